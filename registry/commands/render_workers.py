"""Lay out for people what workers hold and held, what pins them, and the journal.

The rules are those of `render`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime

from weightledger.registry.commands.render import METRIC_COLUMNS, Marks
from weightledger.registry.commands.terminal import Block, Cell, Column, Line, Style, Table, joined, words
from weightledger.registry.commands.wording import (
    SET_BACK,
    UNKNOWN,
    age,
    figure,
    length,
    moment,
    natural,
    pin_target,
    precise,
    some,
    version_name,
    zone,
    zoned,
)
from weightledger.registry.records import Event, Holding, Pin, Version, WorkerStatus

NAMES_SHOWN = 5
WORKERS_SHOWN = 40

_WORKER_STYLES: Mapping[str, Style] = {"confirmed": "good", "unknown": "warn", "gone": "bad"}
_EVENT_STYLES: Mapping[str, Style] = {
    "publish": "good",
    "rollback": "restore",
    "pin": "pin",
    "unpin": "pin",
    "alias": "alias",
    "alias_deleted": "alias",
    "sync_failed": "bad",
    "worker_lost": "bad",
    "drift": "bad",
    "order_jump": "warn",
    "lost": "bad",
}


def status(
    head: Version | None,
    workers: Sequence[WorkerStatus],
    marks: Marks,
    *,
    policy: str,
    user: str,
    now: datetime,
    show_all: bool,
) -> list[Block]:
    """Lay out the head, what points at versions, and the workers."""
    blocks: list[Block] = [Line(_headline(head, policy, user, now))]
    if marks.aliases:
        names = (f"{name} → {version_name(found)}" for name, found in marks.aliases.items())
        blocks.append(Line(words(("aliases  ", "dim"), some(list(names), NAMES_SHOWN))))
    if marks.pins:
        pins = [f"{pin.worker or UNKNOWN} → {pin_target(pin)}" for pin in marks.pins]
        blocks.append(Line(words(("pins     ", "dim"), some(pins, NAMES_SHOWN))))
    if not workers:
        return [
            *blocks,
            Line(),
            Line(words("No workers yet: they appear when an updater first brings them a version.")),
        ]

    arrived = [worker for worker in workers if worker.held is not None and worker.held == worker.target]
    counts = Counter(worker.state for worker in workers)
    rest = ", ".join(f"{counts[state]:,} {state}" for state in ("unknown", "gone") if counts[state])
    everyone: Style = "good" if len(arrived) == len(workers) else "warn"
    blocks += [
        Line(),
        Line(
            words(
                (f"{len(arrived):,} of {len(workers):,} workers hold their target", everyone),
                f"; {rest}" if rest else "",
            )
        ),
    ]
    shown = sorted(workers, key=lambda worker: natural(worker.name))
    if not show_all and len(shown) > WORKERS_SHOWN:
        # In a large fleet those that are not where they should be are what somebody looks for.
        shown = [worker for worker in shown if worker not in arrived][:WORKERS_SHOWN]
    if shown:
        blocks.append(_worker_table(shown, now))
        blocks += _reasons(shown)
    if len(shown) < len(workers):
        blocks.append(Line(words((f"{len(workers) - len(shown):,} more workers: --all.", "dim"))))
    return blocks


def audit_title(
    policy: str,
    *,
    worker: str | None,
    version: str | None,
    at: datetime | None,
    since: datetime | None,
    until: datetime | None,
) -> Cell:
    """Return the question of an audit in words."""
    asked = [words("Policy ", (policy, "title"))]
    asked += [words("worker ", (worker, "title"))] if worker is not None else []
    asked += [words("version ", (version, "title"))] if version is not None else []
    for word, time in (("held at", at), ("since", since), ("until", until)):
        asked += [words(f"{word} ", (f"{precise(time)} {zone([time])}", "title"))] if time is not None else []
    return joined(asked, (", ", ""))


def holdings(
    found: Sequence[Holding], *, title: Cell, now: datetime, older: bool, in_flight: Sequence[Holding] = ()
) -> list[Block]:
    """Lay out who held what, in the order given.

    Args:
        found: The holdings.
        title: The question that they answer.
        now: The present.
        older: Whether older ones were left out.
        in_flight: Pushes that had left at the moment asked about and were not confirmed yet.
    """
    on_the_way = [f"{version_name(row.version)} to {row.worker or UNKNOWN}" for row in in_flight]
    notes = (
        [Line(words(("On its way then, and perhaps there: ", "warn"), some(on_the_way, 10)))]
        if in_flight
        else []
    )
    if not found:
        return [Line(title), Line(words("No holdings found.")), *notes]
    blocks: list[Block] = [
        Line(title),
        Table(
            [
                Column("worker", [words(row.worker or UNKNOWN) for row in found]),
                Column("version", [_held_version(row) for row in found]),
                Column(
                    zoned("pushed", [row.pushed_at for row in found]),
                    [words(precise(row.pushed_at)) for row in found],
                ),
                Column("confirmed", [_confirmed(row) for row in found], rank=1, right=True),
                Column("held for", [_held_for(row, now) for row in found], rank=2, right=True),
                Column("state", [_holding_state(row) for row in found]),
                Column("weights", [_received(row) for row in found], rank=3),
                Column("order", [words((_text(row.order), "dim")) for row in found], rank=6, right=True),
                Column("life", [words(((row.incarnation or "")[:8], "dim")) for row in found], rank=5),
                Column("run", [words(((row.run or UNKNOWN)[:8], "dim")) for row in found], rank=4),
            ]
        ),
    ]
    blocks += notes
    if older:
        blocks.append(Line(words((f"Only the newest {len(found):,} are shown: -n N or --all.", "dim"))))
    return blocks


def events(found: Sequence[Event], *, older: bool) -> list[Block]:
    """Lay out the journal, oldest first."""
    if not found:
        return [Line(words("No events found."))]
    blocks: list[Block] = [
        Table(
            [
                Column(
                    zoned("when", [row.at for row in found]),
                    [words((moment(row.at), "dim")) for row in found],
                ),
                Column(
                    "event", [words((row.kind or UNKNOWN, _EVENT_STYLES.get(row.kind, ""))) for row in found]
                ),
                Column(
                    "version",
                    [words(version_name(row.version) if row.version is not None else "") for row in found],
                ),
                Column("worker", [words(row.worker or "") for row in found], rank=1),
                Column("by", [words((row.user or UNKNOWN, "dim")) for row in found], rank=3),
                Column("run", [words(((row.run or UNKNOWN)[:8], "dim")) for row in found], rank=4),
                Column("what", [_event_words(row) for row in found], stretch="cut"),
            ]
        )
    ]
    if older:
        blocks.append(Line(words((f"Only the newest {len(found):,} are shown: -n N or --all.", "dim"))))
    return blocks


def pins(found: Sequence[Pin]) -> list[Block]:
    """Lay out the pins, oldest first."""
    if not found:
        return [Line(words("No pins: every worker follows the head."))]
    return [
        Table(
            [
                Column("worker", [words((pin.worker or UNKNOWN, "pin")) for pin in found]),
                Column("version", [words(pin_target(pin)) for pin in found]),
                Column(
                    zoned("since", [pin.created_at for pin in found]),
                    [words((moment(pin.created_at), "dim")) for pin in found],
                    rank=1,
                ),
                Column("reason", [_reason(pin) for pin in found], stretch="wrap"),
            ]
        )
    ]


def _headline(head: Version | None, policy: str, user: str, now: datetime) -> Cell:
    if head is None:
        return words(("policy ", "dim"), (policy, "title"), ": no versions yet")
    facts = [
        words(("policy ", "dim"), (policy, "title")),
        words(("head ", "dim"), (version_name(head.number), "bad" if head.damage else "good")),
    ]
    if head.damage:
        return joined([*facts, words(("damaged: ", "bad"), head.damage)], ("  ", ""))
    if head.restores is not None:
        facts.append(words((f"⤺ restores v{head.restores}", "restore")))
    if head.step is not None:
        facts.append(words(("step ", "dim"), f"{head.step}"))
    facts += [
        words((f"{name} ", "dim"), figure(value))
        for name, value in list(head.metrics.items())[:METRIC_COLUMNS]
    ]
    facts.append(words(age(head.created_at, now), f" by {user}" if user else ""))
    if head.nonfinite:
        facts.append(words(("not finite", "bad")))
    return joined(facts, ("  ", ""))


def _worker_table(workers: Sequence[WorkerStatus], now: datetime) -> Table:
    return Table(
        [
            Column("worker", [words(row.name or UNKNOWN) for row in workers]),
            Column("holds", [_holds(row) for row in workers]),
            Column("target", [_version(row.target) for row in workers]),
            Column("behind", [_behind(row) for row in workers], right=True),
            Column("pending", [_version(row.pending, absent="") for row in workers]),
            Column("state", [words((row.state, _WORKER_STYLES[row.state])) for row in workers]),
            Column("as of", [words((age(row.evidence_at, now), "dim")) for row in workers]),
        ]
    )


def _reasons(workers: Sequence[WorkerStatus]) -> list[Line]:
    # Below the table and not in it: they are long, and many workers share one.
    named: dict[str, list[str]] = {}
    for row in workers:
        if row.detail and row.state != "confirmed":
            named.setdefault(row.detail, []).append(row.name or UNKNOWN)
    return [Line(words(f"{some(names, 3)}: ", (detail, "dim"))) for detail, names in named.items()]


def _holds(row: WorkerStatus) -> Cell:
    if row.held is not None:
        return words((version_name(row.held), "good" if row.held == row.target else "warn"))
    return words(
        ("?", "warn"), (f" was {version_name(row.last_held)}" if row.last_held is not None else "", "dim")
    )


def _behind(row: WorkerStatus) -> Cell:
    if row.held is None:
        return words("?")
    if row.staleness is None:
        return words(("abandoned", "warn"))
    return words((str(row.staleness), "" if row.staleness == 0 else "warn"))


def _version(found: int | None, absent: str = "–") -> Cell:
    return words(absent if found is None else version_name(found))


def _held_version(row: Holding) -> Cell:
    same = row.same_content_as
    return words(
        version_name(row.version), (f" = {version_name(same)}" if same is not None else "", "restore")
    )


def _confirmed(row: Holding) -> Cell:
    if row.damage:
        return words((UNKNOWN, "warn"))
    if row.confirmed_at is not None:
        return words((_delay(row.pushed_at, row.confirmed_at), "dim"))
    return words(("not yet" if row.ended_at is None else "never", "warn"))


def _held_for(row: Holding, now: datetime) -> Cell:
    if row.damage:
        return words((UNKNOWN, "warn"))
    if row.confirmed_at is None:
        return words("–")
    if row.ended_at is None and row.state != "held":
        return words(("?", "warn"))
    seen = length(row.confirmed_at, row.ended_at or now)
    # Its end is the last evidence of it, and the process may have gone on.
    return words(f"≥ {seen}" if row.ended_how == "lost" and seen != SET_BACK else seen)


def _delay(start: datetime, end: datetime) -> str:
    seen = length(start, end)
    return seen if seen == SET_BACK else f"+{seen}"


def _holding_state(row: Holding) -> Cell:
    if row.damage:
        return words(("damaged", "bad"))
    if row.state == "ended":
        return words((row.ended_how or "ended", "dim"))
    return words((row.state, "good" if row.state == "held" else "warn"))


def _received(row: Holding) -> Cell:
    return words(("mapped or cast", "warn") if row.sent_digest != row.digest else "")


def _reason(pin: Pin) -> Cell:
    return words(("damaged: ", "bad"), pin.damage) if pin.damage else words(pin.reason)


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)


def _event_words(row: Event) -> Cell:
    if row.damage:
        return words(("damaged: ", "bad"), row.damage)
    details = ", ".join(f"{name} {value}" for name, value in row.details.items() if value is not None)
    return words(row.reason, " " if row.reason else "", (f"({details})" if details else "", "dim"))
