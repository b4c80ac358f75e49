"""Where cases are run: two zygotes, a disk in memory, and the count of what was done."""

from __future__ import annotations

import os
import queue
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from tests.torture import cases, damage, shim
from tests.torture.check import Verdict, check
from tests.torture.shim import Kind, Plan
from tests.torture.zygote import Ended, Zygote

WHOLE = os.environ.get("WEIGHTLEDGER_TORTURE") == "1"
"""Whether all cases are run, or a share."""
SEED = 20_240_229
_PLACES = 2  # cases at once

T = TypeVar("T")


def share(items: Iterable[T], few: int, many: int | None = None) -> list[T]:
    """Return what a seed chooses: a few, or where all cases are run all of them, or so many."""
    every = list(items)
    wanted = len(every) if WHOLE and many is None else many if WHOLE else few
    assert wanted is not None
    return every if len(every) <= wanted else random.Random(SEED).sample(every, wanted)


@dataclass(frozen=True)
class Call:
    """A file system call that a scenario made."""

    number: int
    kind: Kind
    name: str
    size: int
    path: str


@dataclass(frozen=True)
class Start:
    """A folder that cases begin with, and the stories of how it came to be."""

    root: Path
    stories: tuple[Path, ...]


class Ground:
    """Runs cases, several at once."""

    def __init__(self, library: Path, scratch: Path, figures: Counter[str]) -> None:
        self._zygotes: queue.SimpleQueue[Zygote] = queue.SimpleQueue()
        for _ in range(_PLACES):
            self._zygotes.put(Zygote(library))
        self._pool = ThreadPoolExecutor(_PLACES)
        self._scratch = scratch
        self._numbers = count()
        self.figures = figures
        self._starts: dict[str, Start] = {}
        self._sound: tuple[Path, damage.Sound] | None = None

    def close(self) -> None:
        """End the zygotes."""
        self._pool.shutdown()
        for _ in range(_PLACES):
            self._zygotes.get().close()

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float = 60) -> Ended:
        """Run a function in a child of a zygote."""
        zygote = self._zygotes.get()
        try:
            return zygote.call(function, *arguments, seconds=seconds)
        finally:
            self._zygotes.put(zygote)

    def each(self, function: Callable[[T], list[str]], items: Iterable[T]) -> list[str]:
        """Call a function for each item, several at once; returns all problems."""
        return [problem for found in self._pool.map(function, items) for problem in found]

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Give a new folder that is removed afterwards."""
        made = self._scratch / f"case-{next(self._numbers)}"
        made.mkdir()
        try:
            yield made
        finally:
            shutil.rmtree(made)

    # ------------------------------------------------------------------ scenarios

    def start_of(self, name: str) -> Start:
        """Return what a scenario begins with, made once."""
        if name not in self._starts:
            made = self._scratch / f"start-{len(self._starts)}"
            root, story = made / "root", made / "story"
            root.mkdir(parents=True)
            ended = self.call(cases.prepare, name, root, story)
            assert ended.code == 0, ended.told
            self._starts[name] = Start(root, (story,))
        return self._starts[name]

    def calls_of(self, name: str, kinds: int) -> list[Call]:
        """Return the calls that a scenario makes when nothing happens to it, having checked that all is well."""
        start = self.start_of(name)
        with self.folder() as folder:
            root = _copy(start, folder)
            trace = folder / "trace"
            ended = self.call(cases.run, name, root, folder / "story", Plan(kinds), trace)
            assert ended.code == 0, ended.told
            verdict = self._check(root, *start.stories, folder / "story")
            assert not verdict.problems, verdict.problems
            calls = []
            for line in trace.read_text(encoding="utf-8").splitlines():
                number, kind, called, size, path = line.split(" ", 4)
                calls.append(Call(int(number), Kind(int(kind)), called, int(size), path))
        # Threads that write at once may tell of their calls in another order than they made them.
        calls.sort(key=lambda call: call.number)
        assert [call.number for call in calls] == list(range(1, len(calls) + 1))
        return calls

    def run(self, name: str, plan: Plan, start: Start | None = None) -> list[str]:
        """Run a scenario with a plan, and check what is left."""
        start = self.start_of(name) if start is None else start
        with self.folder() as folder:
            root = _copy(start, folder)
            ended = self.call(cases.run, name, root, folder / "story", plan)
            problems = self.judge(ended, plan)
            if not problems:
                problems = self._check(root, *start.stories, folder / "story").problems
        return [f"{name}, {plan}: {problem}" for problem in problems]

    def run_two(self, plan: Plan) -> list[str]:
        """Let two processes publish at once, one of which meets the plan."""
        start = self.start_of("publish")
        with self.folder() as folder:
            root = _copy(start, folder)
            stories = (folder / "story", folder / "other-story")
            ended = self.call(cases.two_writers, root, *stories, plan)
            if ended.code or ended.hung:
                return [f"two writers, {plan}: the other one {_how(ended)}"]
            self.figures["kills"] += ended.value == -signal.SIGKILL
            problems = self._check(root, *start.stories, *stories).problems
        return [f"two writers, {plan}: {problem}" for problem in problems]

    def killed(self, name: str, plan: Plan, into: Path) -> Start:
        """Return what a killed writer leaves, as a start for others."""
        start = self.start_of(name)
        root = _copy(start, into)
        ended = self.call(cases.run, name, root, into / "story", plan)
        assert ended.code == -signal.SIGKILL, ended
        self.figures["kills"] += 1
        return Start(root, (*start.stories, into / "story"))

    # ------------------------------------------------------------------ damage

    def sound(self) -> tuple[Path, damage.Sound]:
        """Return an unharmed registry with a row in every table, and what it holds; made once."""
        if self._sound is None:
            folder = self._scratch / "sound" / "r"
            folder.parent.mkdir()
            ended = self.call(damage.make, folder)
            assert ended.code == 0, ended.told
            self._sound = folder, ended.value
        return self._sound

    def harm(self, what: damage.Harm) -> list[str]:
        """Harm a copy of the unharmed registry, and ask it everything."""
        ended = self.call(damage.look, *self.sound(), what)
        if ended.code or ended.hung:
            return [f"{what}: the child {_how(ended)}"]
        self.figures["damages"] += ended.value is not None
        return [f"{what}: {problem}" for problem in ended.value or []]

    # ------------------------------------------------------------------ how children end

    def judge(self, ended: Ended, plan: Plan) -> list[str]:
        """Say what is wrong with how a child ended."""
        if ended.hung:
            return [_how(ended)]
        if plan.action in (shim.Action.KILL, shim.Action.KILL_HALF_WRITTEN):
            # A few calls depend on the moment: the one that was chosen may not come.
            if ended.code in (0, -signal.SIGKILL):
                self.figures["kills"] += ended.code != 0
                return []
        elif ended.code == 0:
            self.figures["disk errors"] += 1
            return []
        return [_how(ended)]

    def _check(self, root: Path, *stories: Path) -> Verdict:
        ended = self.call(check, root, *stories)
        if ended.code or ended.hung:
            return Verdict([f"the check {_how(ended)}"])
        assert isinstance(ended.value, Verdict)
        self.figures["records compared"] += ended.value.compared
        return ended.value


def _copy(start: Start, folder: Path) -> Path:
    root = folder / "root"
    shutil.copytree(start.root, root)
    return root


def _how(ended: Ended) -> str:
    return f"{'hung' if ended.hung else f'ended with {ended.code}'}:\n{ended.told[-4000:]}"
