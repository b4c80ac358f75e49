"""The commands that change or keep: rollback, pin, unpin, alias; publish, export, verify, prune, upgrade.

A decision is an intention in the registry; no cluster is needed, and a running updater carries it out at its next
update. Torch is imported only where tensors are read.
"""

# Typer evaluates the annotations of the commands, so this module does without the `annotations` future.
from pathlib import Path
from typing import Annotated, Any

import typer

from weightledger.registry import places
from weightledger.registry.commands import options, render, render_workers
from weightledger.registry.commands.dispatch import Answer, Call, RefArgument, accepting, command
from weightledger.registry.commands.terminal import Line, words
from weightledger.registry.commands.wording import pin_target, size, version_name
from weightledger.registry.errors import InvalidWeightsError, NotFoundError, SchemaError, StorageError
from weightledger.registry.values import surrogate

LiteralOption = Annotated[
    bool,
    typer.Option("--literal", help="WORKER is one worker's name, whatever characters it has: 'env[12]'."),
]


@command
def rollback(
    call: Call,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept in the log.")],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="REF", help="The version to restore; else the nearest that differs."),
    ] = None,
    expected_head: Annotated[
        int | None,
        typer.Option("--expected-head", metavar="N", help="Only if the head still has this number."),
    ] = None,
    restructure: Annotated[
        bool, typer.Option("--restructure", help="Also to other names or shapes than the head's.")
    ] = False,
) -> Answer:
    """Make an older version's content the head again.

    It becomes a new version, so that numbers never fall. Pinned workers stay where they are.
    """
    if not reason.strip():
        raise typer.BadParameter("say why, for those who read the log later.", param_hint="--reason")
    with call.writing() as registry:
        made = registry.rollback(to, reason=reason, expected_head=expected_head, restructure=restructure)
    line = words(
        (version_name(made.number), "good"), (f" restores v{made.restores}", "restore"), " and is the head."
    )
    return Answer(made, lambda: [Line(line)])


@command
def pin(
    call: Call,
    worker: Annotated[
        str | None, typer.Argument(metavar="WORKER", help="A worker's name, or a glob in quotes: 'eval-*'.")
    ] = None,
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="A version; an alias is followed when it moves.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the pin.")] = "",
    literal: LiteralOption = False,
) -> Answer:
    """Hold workers at a version, or list the pins.

    Pinned workers stay there whatever the head does. An exact name beats a glob; of two globs the newer wins.
    """
    if worker is None:
        with call.reading() as registry:
            found = registry.pins()
        return Answer(found, lambda: render_workers.pins(found))
    if ref is None:
        raise typer.BadParameter("which version? WORKER needs a REF after it.", param_hint="REF")
    with call.writing() as registry, accepting("WORKER"):
        registry.pin(worker, ref, reason=reason, literal=literal)
        made = [pin for pin in registry.pins() if pin.worker == worker][-1]
    return Answer(made, lambda: [Line(words((worker, "pin"), f" is pinned to {pin_target(made)}."))])


@command
def unpin(
    call: Call,
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="The name or glob exactly as it was pinned.")
    ],
    literal: LiteralOption = False,
) -> Answer:
    """Remove a pin."""
    with call.writing() as registry:
        registry.unpin(worker, literal=literal or None)
        left = registry.pins()
    return Answer(left, lambda: [Line(words((worker, "pin"), " is no longer pinned."))])


@command
def alias(
    call: Call,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The alias to set.")] = None,
    ref: Annotated[str | None, typer.Argument(metavar="REF", help="The version that it stands for.")] = None,
    delete: Annotated[str | None, typer.Option("--delete", metavar="NAME", help="Forget this alias.")] = None,
) -> Answer:
    """Let a name stand for a version, or list the aliases.

    Pins that follow an alias move with it.
    """
    if delete is not None:
        if name is not None:
            raise typer.BadParameter("either set an alias or delete one.", param_hint="--delete")
        with call.writing() as registry:
            registry.delete_alias(delete)
            found = registry.aliases()
        return Answer(found, lambda: [Line(words("Deleted the alias ", (delete, "alias"), "."))])
    if name is None:
        with call.reading() as registry:
            found = registry.aliases()
        return Answer(found, lambda: render.aliases(found))
    if ref is None:
        raise typer.BadParameter("which version? NAME needs a REF after it.", param_hint="REF")
    with call.writing() as registry, accepting("NAME"):
        registry.set_alias(name, ref)
        found = registry.aliases()
    return Answer(found, lambda: [Line(words((name, "alias"), f" stands for {version_name(found[name])}."))])


@command
def publish(
    call: Call,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors file.")],
    step: Annotated[int | None, typer.Option("--step", help="The training step it belongs to.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME=NUMBER", help="A metric; may be repeated.")
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", metavar="NAME=VALUE", help="A JSON value or text; may be repeated."),
    ] = None,
    message: Annotated[str, typer.Option("--message", "-m", help="One line for the log.")] = "",
    parent: Annotated[
        int | None,
        typer.Option(
            "--parent", metavar="N", min=0, help="Only if the head has this number; 0: only a first version."
        ),
    ] = None,
    restructure: Annotated[
        bool, typer.Option("--restructure", help="Accept other names and shapes than the head's.")
    ] = False,
) -> Answer:
    """Store a safetensors file's tensors as the next version.

    It becomes the head. Makes the registry if there is none.
    """
    metrics = options.parse_metrics(metric or [], "--metric")
    details = options.parse_metadata(metadata or [], "--metadata")
    # Everything that can be refused is looked at first: it must not leave an empty registry behind.
    weights = _read_safetensors(file)
    _check_publishable(weights, step, metrics, details, message)
    with call.writing() if parent else call.publishing() as registry:
        made = registry.publish(
            weights,
            step=step,
            metrics=metrics,
            metadata=details,
            message=message,
            parent=parent,
            restructure=restructure,
        )
    line = words(
        "Published ", (version_name(made.number), "good"), f", {size(made.size_bytes)}, {made.digest}."
    )
    return Answer(made, lambda: [Line(line)])


@command
def export(
    call: Call,
    ref: RefArgument,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> Answer:
    """Write a version as a plain safetensors file."""
    if _is_there(path) and not (force and path.is_file()):
        what = "is a folder: name a file in it" if path.is_dir() else "exists: pass --force to replace it"
        raise StorageError(f"cannot export to {str(path)!r}: it {what}")
    with call.reading() as registry:
        found = registry.get(ref)
        written = registry.export(found, path)
    data = {"version": found.number, "digest": found.digest, "path": str(written)}
    return Answer(
        data, lambda: [Line(words("Wrote ", (version_name(found.number), "good"), f" to {written}."))]
    )


@command
def verify(
    call: Call,
    ref: Annotated[str | None, typer.Argument(metavar="REF", help="Only this version.")] = None,
) -> Answer:
    """Read stored files again and compare them with the record.

    Changes nothing. The exit code is 1 when it found faults.
    """
    with call.reading() as registry:
        found = registry.verify(ref)
        number = None if ref is None else registry.get(ref).number
        stored = 1 if number is not None else sum(item.stored for item in registry.versions())
    what = (
        version_name(number)
        if number is not None
        else f"{stored:,} stored version{'' if stored == 1 else 's'}"
    )
    return Answer(found, lambda: render.faults(found, what=what), exit_code=1 if found else 0)


@command
def prune(
    call: Call,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", min=1, help="Keep the newest N.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="N", min=1, help="Keep numbers divisible by N.")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            "--keep-best",
            metavar="METRIC:N",
            help="Keep the best N by a metric; METRIC:N:min for the lowest.",
        ),
    ] = None,
    forget_worker: Annotated[
        str | None,
        typer.Option(
            "--forget-worker",
            metavar="GLOB",
            help="Workers that are known to be dead: what they held last is ended as lost.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Delete nothing; show what would go, and why the rest stays.")
    ] = False,
) -> Answer:
    """Delete the weights of versions that nobody needs.

    The head, what a rollback goes back to, and what is pinned, aliased, held or kept by a rule, stays. Rows and the
    audit stay in any case.
    """
    if keep_last is None and keep_every is None and keep_best is None:
        raise typer.BadParameter(
            "say what to keep: --keep-last, --keep-every, --keep-best, or several of them."
        )
    rule = None if keep_best is None else options.parse_keep_best(keep_best, "--keep-best")
    with call.reading() if dry_run else call.writing() as registry:
        report = registry.prune(
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=rule,
            forget_worker=forget_worker,
            dry_run=dry_run,
        )
    data = {"dry_run": dry_run, "pruned": list(report), "kept": report.kept}
    return Answer(data, lambda: render.prune(report, dry_run=dry_run))


@command
def upgrade(call: Call) -> Answer:
    """Bring an older registry's database up to date."""
    try:
        with call.upgrading() as registry:
            location, done = registry.location, False
    except SchemaError:
        location, done = places.upgrade(call.location or ""), True
    said = "is upgraded" if done else "is up to date already"
    return Answer({"registry": str(location), "upgraded": done}, lambda: [Line(words(f"{location} {said}."))])


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # nobody can look: the library says what is in the way


def _check_publishable(
    weights: dict[str, Any],
    step: int | None,
    metrics: dict[str, float],
    metadata: dict[str, Any],
    message: str,
) -> None:
    from weightledger.registry.store.publishing import check_words
    from weightledger.registry.weights import codec

    check_words(step, metrics, metadata, message)
    codec.flatten(weights)


def _read_safetensors(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise NotFoundError(f"cannot publish {str(file)!r}: there is no such file")
    from safetensors import SafetensorError
    from safetensors.torch import load, load_file

    try:
        # A name that is no UTF-8 is one that only Python can open.
        return load(file.read_bytes()) if surrogate(str(file)) else load_file(file)
    except SafetensorError as error:
        raise InvalidWeightsError(
            f"cannot publish {str(file)!r}: expected a safetensors file; it is another kind of file, or damaged"
        ) from error
