"""One application made of the commands in `asking` and `changing`.

Rules
- A command calls the library and answers; `dispatch` opens and prints, `render` and `render_workers` lay out.
- `--registry`, `--policy` and `--json` stand before or after the command's name.
- No torch before tensors are touched, no rich before something is drawn, so that the answer comes at once.
"""

from importlib.metadata import version
from typing import Annotated

import typer

from weightledger.registry.commands import asking, changing
from weightledger.registry.commands.dispatch import Call, JsonOption

app = typer.Typer(
    name="weightledger",
    help="See and decide which policy weights exist, which should run, and who ran which.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

_PANELS = {
    "Ask": (
        asking.status,
        asking.log,
        asking.show,
        asking.diff,
        asking.audit,
        asking.events,
        asking.best,
    ),
    "Decide: a running updater carries it out at its next update": (
        changing.rollback,
        changing.pin,
        changing.unpin,
        changing.alias,
    ),
    "Keep": (
        changing.publish,
        changing.export,
        changing.verify,
        changing.prune,
        changing.upgrade,
    ),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weightledger {version('weightledger')}")
        raise typer.Exit


@app.callback()
def _main(
    ctx: typer.Context,
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry", metavar="DIR", envvar="WEIGHTLEDGER_REGISTRY", help="The registry's folder."
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="The series of versions.")
    ] = "default",
    as_json: JsonOption = False,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    ctx.obj = Call(registry, policy, as_json)
