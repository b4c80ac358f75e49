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

from weightledger.registry.log.fleet import Settlement
from weightledger.updater.push import Inspection, Probe
from weightledger.updater.seats import Seat
from weightledger.updater.settling import read_answer

if TYPE_CHECKING:
    from weightledger.updater.base import RemoteWeightUpdaterBase

# How long an update waits for answers at most.
_PATIENCE = 0.25
# The part of the run that may be spent waiting for answers that do not come.
_SHARE = 0.02


class Asking:
    """Asks an updater's workers, from one update to the next."""

    def __init__(self, updater: RemoteWeightUpdaterBase) -> None:
        self._up = updater
        self._began = time.monotonic()
        self._in_vain = 0.0

    def ask(self, seats: Iterable[Seat]) -> list[Seat]:
        """Ask workers, and return those that were asked. Nobody is waited for."""
        up = self._up
        question = Probe(up.series, up.locate, None, hashes=False)
        asked = []
        for seat in seats:
            if seat.known is None or seat.question is not None or seat.gone:
                continue
            try:
                seat.question = up._ask(seat.id, question)
            except Exception:  # noqa: BLE001 - whether it lives is looked at elsewhere
                continue
            if seat.question is not None:
                asked.append(seat)
        return asked

    def hear(self, seats: Sequence[Seat], *, wait: bool) -> dict[int, Settlement]:
        """Take the answers that have come, and forget what is known of workers whose weights are others now.

        Returns:
            How the holding of each of those ended, by worker id.
        """
        questions = {seat.id: seat.question for seat in seats if seat.question is not None}
        if not questions:
            return {}
        began = time.monotonic()
        budget = _PATIENCE + _SHARE * (began - self._began) - self._in_vain
        answers = self._up._collect(questions, max(0.0, min(_PATIENCE, budget)) if wait else 0.0, not wait)
        if wait and len(answers) < len(questions):
            self._in_vain += time.monotonic() - began
        ended = {}
        for seat in seats:
            if seat.id not in answers:
                continue
            self._up._spent.append(seat.question)
            seat.question, answer = None, answers[seat.id]
            settlement = read_answer(seat, answer) if isinstance(answer, Inspection) else None
            if settlement is not None and seat.known is not None:
                seat.known = seat.open_held = None
                ended[seat.id] = settlement
        return ended
