"""Updaters that note when each stage of an update is reached, by the hooks that every updater may override."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from tests.benchmarks.scaling.fitting import Timeline
from weightledger.updater import RayRemoteWeightUpdater, ServerWeights, Updater
from weightledger.updater.testing import FakeWorkers


class _Watched(Updater):
    """Goes before a real updater among the bases of a class."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._stages: dict[str, float] = {}
        super().__init__(*arguments, **options)
        self._collect, self.transport.collect = self.transport.collect, self._collect_timed  # type: ignore[method-assign]

    def timed(self, call: Callable[[], Any]) -> tuple[Any, Timeline]:
        """Run one update, and return its report and its stages."""
        self._stages = {}
        began, spent = time.perf_counter(), time.process_time()
        report = call()
        ended = time.perf_counter()
        marks = {"ready": began, "work_ready": spent} | self._stages
        ready_work = marks.pop("work_ready") - spent
        work = marks.pop("work_taken") - marks.pop("work_sending")
        sending_work = marks.pop("thread_sent") - marks.pop("thread_sending")
        works = {"ready_work": ready_work, "sending_work": sending_work, "work": work}
        return report, Timeline(began=began, ended=ended, **works, **marks)

    def _get_server_weights(self) -> ServerWeights:
        weights = super()._get_server_weights()
        self._stages["ready"] = time.perf_counter()
        self._stages["work_ready"] = time.process_time()
        return weights

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        if "sending" not in self._stages:
            self._stages["work_sending"] = time.process_time()
            self._stages["thread_sending"] = time.thread_time()
            self._stages["sending"] = time.perf_counter()
        answer = super()._sync_weights_with_worker(worker_id, server_weights)
        self._stages["sent"] = time.perf_counter()
        self._stages["thread_sent"] = time.thread_time()
        return answer

    def _collect_timed(self, handles: Mapping[int, Any], timeout: float, eager: bool) -> dict[int, Any]:
        self._stages.setdefault("durable", time.perf_counter())
        references = [handle for handle in handles.values() if isinstance(handle, ray.ObjectRef)]
        if references:
            ray.wait(references, num_returns=len(references), timeout=timeout)
        # An update may collect several times; the last one had all.
        self._stages["arrived"] = time.perf_counter()
        answers = self._collect(handles, timeout, eager)
        self._stages["taken"] = time.perf_counter()
        self._stages["work_taken"] = time.process_time()
        return answers


class WatchedUpdater(_Watched, RayRemoteWeightUpdater):
    """The real one."""


class WatchedFakes(_Watched, FakeWorkers):
    """Planning and records of the real one, workers that are method calls."""
