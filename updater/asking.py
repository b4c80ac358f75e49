"""Questions to workers that an update sends nothing to: are your weights still what was written into them?

Rules kept here
- A busy worker answers when it can. Nobody waits for it longer than a moment, and with one worker that is always busy
  all such waits together stay a small part of the run; what comes later counts at the next update.
- A worker is asked once at a time, so that questions do not pile up before it.
- Nothing is recorded of a worker whose weights are still there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from weightledger.registry.sync import Settlement
from weightledger.updater.messages import Probe
from weightledger.updater.workers.state import WorkerState

if TYPE_CHECKING:
    from weightledger.updater.updater import Updater

# How long an update waits for answers at most.
_PATIENCE = 0.25
# The part of the run that may be spent waiting for answers that do not come.
_SHARE = 0.02


class Asking:
    """Asks an updater's workers, from one update to the next."""

    def __init__(self, updater: Updater) -> None:
        self._up = updater
        self._began = time.monotonic()
        self._in_vain = 0.0

    def ask(self, workers: Iterable[WorkerState]) -> list[WorkerState]:
        """Ask workers, and return those that were asked. Nobody is waited for."""
        up = self._up
        question = Probe(up.record.series, up.locate, None, hashes=False)
        asked = []
        for worker in workers:
            if worker.known is None or worker.question is not None or worker.gone:
                continue
            try:
                answer = up._ask(worker, question)
            except Exception:  # noqa: BLE001 - whether it lives is looked at elsewhere
                continue
            if answer is not None:
                up.workers.asked(worker, answer)
                asked.append(worker)
        return asked

    def hear(self, workers: Sequence[WorkerState], *, wait: bool) -> dict[int, Settlement]:
        """Take the answers that have come, and forget what is known of workers whose weights are others now.

        Returns:
            How the holding of each of those ended, by worker id.
        """
        questions = {worker.id: worker.question for worker in workers if worker.question is not None}
        if not questions:
            return {}
        began = time.monotonic()
        budget = _PATIENCE + _SHARE * (began - self._began) - self._in_vain
        patience = max(0.0, min(_PATIENCE, budget)) if wait else 0.0
        answers = self._up.transport.collect(questions, patience, not wait)
        if wait and len(answers) < len(questions):
            self._in_vain += time.monotonic() - began
        ended = {}
        for worker in workers:
            if worker.id in answers:
                settlement = self._up.workers.heard(worker, answers[worker.id])
                if settlement is not None:
                    ended[worker.id] = settlement
        return ended
