"""The commands that ask: status, log, show, diff, audit, events, best.

Each calls the library and answers with its records; `render` and `render_workers` lay them out. With `--json` nothing
is left out that was not limited on purpose.
"""

# Typer evaluates the annotations of the commands, so this module does without the `annotations` future.
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, TypedDict

import typer

from weightledger.registry.commands import options, render, render_workers, terminal
from weightledger.registry.commands.dispatch import Answer, Call, RefArgument, command
from weightledger.registry.commands.terminal import Line, words
from weightledger.registry.commands.wording import figure, version_name
from weightledger.registry.core import Registry
from weightledger.registry.records import Holding, Version

LOG_ROWS = 30
AUDIT_ROWS = 50

LimitOption = Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Show the newest so many.")]
AllOption = Annotated[bool, typer.Option("--all", help="Leave nothing out.")]
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help=f"From then on. {options.TIME_HELP}")
]
UntilOption = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Up to then; as --since.")]


@command
def status(call: Call, show_all: AllOption = False) -> Answer:
    """Show the head, and what workers hold and should hold.

    A worker that nobody has heard of since its updater died is 'unknown', not assumed to be where it was.
    """
    with call.reading() as registry:
        head = _head(registry)
        marks, missing = _marks(registry)
        workers = registry.workers()
        user = "" if head is None else _users(registry, [head]).get(head.number, "")
        data = {
            "registry": str(registry.location),
            "uuid": registry.uuid,
            "policy": call.policy,
            "head": head,
            "aliases": marks.aliases,
            "pins": marks.pins,
            "workers": workers,
        }
    return Answer(
        data,
        lambda: render_workers.status(
            head, workers, marks, policy=call.policy, user=user, now=_now(), show_all=show_all
        ),
        missing=missing,
    )


@command
def log(call: Call, limit: LimitOption = None, show_all: AllOption = False) -> Answer:
    """Draw the lineage of versions, newest first.

    With rollbacks, abandoned branches, and what points where.
    """
    rows = call.rows(limit, show_all, LOG_ROWS)
    with call.reading() as registry:
        versions = registry.versions(None if rows is None else rows + 1)
        older = rows is not None and len(versions) > rows
        before, versions = (versions[0], versions[1:]) if older else (None, versions)
        if call.as_json:
            return Answer(versions, list)
        (marks, missing), users = _marks(registry), _users(registry, versions)
    return Answer(
        versions,
        lambda: render.log(versions, marks, users, older=older, before=before),
        missing=missing,
    )


@command
def show(call: Call, ref: RefArgument = "head") -> Answer:
    """Show everything known of one version."""
    with call.reading() as registry:
        found = registry.get(ref)
        marks, missing = _marks(registry)
        staleness = registry.staleness(found) if found.state in ("stored", "pruned") else None
        held = [row for row in registry.holdings() if row.state == "held"]
        holders = [row.worker for row in held if row.digest == found.digest]
        user = _users(registry, [found]).get(found.number, "")
        with registry.ledger.reading() as conn:
            same = registry.ledger.same_content(conn, found)
    data = {
        **found.to_dict(),
        "staleness": staleness,
        "is_head": found.number == marks.head,
        "aliases": [name for name, number in marks.aliases.items() if number == found.number],
        "pins": [pin.worker for pin in marks.pins if pin.version == found.number],
        "held_by": holders,
        "same_content": same,
    }
    return Answer(
        data,
        lambda: render.version(
            found, marks, staleness=staleness, holders=holders, user=user, now=_now(), same=same
        ),
        missing=missing,
    )


@command
def diff(call: Call, a: RefArgument, b: RefArgument = "head", show_all: AllOption = False) -> Answer:
    """Compare two versions tensor by tensor.

    Changed, only in one, or the same; the same ones are counted, and listed with --all. Reads headers only.
    """
    with call.reading() as registry:
        before, after = registry.get(a), registry.get(b)
        old, new = registry.tensor_hashes(before), registry.tensor_hashes(after)
    tensors = {
        "changed": [name for name in old if name in new and old[name] != new[name]],
        "only_a": [name for name in old if name not in new],
        "only_b": [name for name in new if name not in old],
        "same": [name for name in old if new.get(name) == old[name]],
    }
    data = {"a": before.number, "b": after.number, "equal": before.digest == after.digest, **tensors}
    return Answer(data, lambda: render.diff(before, after, tensors, show_all=show_all))


@command
def audit(
    call: Call,
    worker: Annotated[str | None, typer.Option("--worker", metavar="NAME", help="Only this worker.")] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--version", metavar="REF", help="Only this version; also where its content had another number."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="What each worker held at that moment; as --since."),
    ] = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: LimitOption = None,
    show_all: AllOption = False,
) -> Answer:
    """Show who held which version, and when.

    A worker switched between the push and its confirmation; from then on it is certain.
    """
    if at is not None and (since is not None or until is not None):
        raise typer.BadParameter("--at names one moment: leave out --since and --until.", param_hint="--at")
    moment = None if at is None else options.parse_time(at, "--at")
    span = _span(since, until)
    rows = call.rows(limit, show_all, AUDIT_ROWS)
    in_flight: list[Holding] = []
    with call.reading() as registry:
        if moment is None:
            wanted = None if rows is None else rows + 1
            found = registry.history(worker=worker, version=version, limit=wanted, **span)
        else:
            found, in_flight = _held_at(registry, moment, worker, version)
    older = moment is None and rows is not None and len(found) > rows
    found = found[1:] if older else found if limit is None else found[:limit]
    title = render_workers.audit_title(call.policy, worker=worker, version=version, at=moment, **span)
    return Answer(
        found,
        lambda: render_workers.holdings(found, title=title, now=_now(), older=older, in_flight=in_flight),
    )


@command
def events(
    call: Call,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Only this kind: publish, rollback, pin, …")
    ] = None,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="NAME", help="Only of this worker.")
    ] = None,
    version: Annotated[
        str | None, typer.Option("--version", metavar="REF", help="Only of this version.")
    ] = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: LimitOption = None,
    show_all: AllOption = False,
) -> Answer:
    """Show the journal: who decided what, and what went wrong."""
    span = _span(since, until)
    rows = call.rows(limit, show_all, AUDIT_ROWS)
    with call.reading() as registry:
        number = None if version is None else registry.get(version).number
        found = registry.events(
            kind=kind, worker=worker, version=number, limit=None if rows is None else rows + 1, **span
        )
    older = rows is not None and len(found) > rows
    found = found[1:] if older else found
    return Answer(found, lambda: render_workers.events(found, older=older))


@command
def best(
    call: Call,
    metric: Annotated[str, typer.Argument(metavar="METRIC", help="The name of a metric.")],
    mode: Annotated[
        Literal["max", "min"], typer.Option("--mode", help="Whether more or less is better.")
    ] = "max",
) -> Answer:
    """Show the stored version that is best by a metric.

    NaN and infinities never win; of equal ones the newest does.
    """
    with call.reading() as registry:
        found = registry.best(metric, mode)
    facts = [
        words((version_name(found.number), "good")),
        words((f"{metric} ", "dim"), figure(found.metrics[metric])),
    ]
    facts += [] if found.step is None else [words(("step ", "dim"), str(found.step))]
    return Answer(found, lambda: [Line(terminal.joined(facts, ("  ", "")))])


def _head(registry: Registry) -> Version | None:
    """Return the head, marked if it is damaged."""
    newest = registry.versions(1)
    return newest[0] if newest else None


def _marks(registry: Registry) -> tuple[render.Marks, list[str]]:
    """Return what points at versions, and what of that is damaged."""
    head = _head(registry)
    number = None if head is None else head.number
    with registry.ledger.reading() as conn:
        aliases, missing = registry.ledger.listed_aliases(conn)
    pins = registry.pins()
    return render.Marks(number, aliases, pins), [*missing, *(pin.damage for pin in pins if pin.damage)]


def _users(registry: Registry, versions: list[Version]) -> dict[int, str]:
    """Return who wrote these versions, as the journal has it."""
    if len(versions) == 1 and not versions[0].damage:
        lines = registry.events(version=versions[0].number)
    else:
        lines = [
            line
            for kind in ("publish", "rollback")
            for line in registry.events(kind=kind, limit=len(versions))
        ]
    return {
        line.version: line.user
        for line in lines
        if line.version is not None and line.kind in ("publish", "rollback")
    }


class _Span(TypedDict):
    since: datetime | None
    until: datetime | None


def _span(since: str | None, until: str | None) -> _Span:
    first = None if since is None else options.parse_time(since, "--since")
    last = None if until is None else options.parse_time(until, "--until")
    if first is not None and last is not None and first > last:
        raise typer.BadParameter("--since lies after --until.", param_hint="--since")
    return {"since": first, "until": last}


def _held_at(
    registry: Registry, moment: datetime, worker: str | None, version: str | None
) -> tuple[list[Holding], list[Holding]]:
    """Return what was held at a moment, and the pushes that were on their way and may have arrived."""
    # Asked first also for its own sake: it refuses a worker that does not exist.
    around = registry.history(worker=worker, since=moment, until=moment + timedelta(microseconds=1))
    in_flight = [row for row in around if row.confirmed_at is None or row.confirmed_at > moment]
    held = [row for row in registry.holdings(moment) if worker in (None, row.worker)]
    if version is None:
        return held, in_flight
    found = registry.get(version)
    same, sent = ([row for row in rows if row.digest == found.digest] for rows in (held, in_flight))
    return [
        row if row.version == found.number else replace(row, same_content_as=found.number) for row in same
    ], sent


def _now() -> datetime:
    return datetime.now(UTC)
