"""What all commands share: where to look, how to open it, how to answer, how to say that something is refused.

Rules
- Reading opens a registry as it is, writing may migrate it, only publishing makes one.
- What the library refuses is one line on stderr and its causes, exit code 1; what cannot be read is exit code 2.
"""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from weightledger.registry.commands import terminal
from weightledger.registry.commands.terminal import Block
from weightledger.registry.core import Registry, check_folder
from weightledger.registry.errors import NotFoundError, WeightLedgerError
from weightledger.registry.records import plain

P = ParamSpec("P")

RegistryOption = Annotated[
    str | None,
    typer.Option("--registry", metavar="DIR", help="The registry's folder; else $WEIGHTLEDGER_REGISTRY."),
]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", metavar="NAME", help="The series of versions; else 'default'.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print records as JSON, complete, times in UTC.")]
RefArgument = Annotated[
    str,
    typer.Argument(
        metavar="REF", help="A version: number, alias, head, head~2, best:METRIC[:min] or blake3:DIGITS."
    ),
]


@dataclass(frozen=True)
class Answer:
    """What a command found: for programs, for people, and whether that is well."""

    data: Any
    page: Callable[[], list[Block]]
    exit_code: int = 0


@dataclass(frozen=True)
class Call:
    """What every command is told: where to look, and how to answer."""

    location: str | None
    policy: str
    as_json: bool

    @contextmanager
    def reading(self) -> Iterator[Registry]:
        """Open the registry as it is."""
        with self._open(create=False, migrate=False) as registry:
            self._check_policy(registry)
            yield registry

    @contextmanager
    def writing(self) -> Iterator[Registry]:
        """Open the registry to change it; an older database is migrated."""
        with self._open(create=False, migrate=True) as registry:
            self._check_policy(registry)
            yield registry

    @contextmanager
    def publishing(self) -> Iterator[Registry]:
        """Open the registry, making what is missing."""
        with self._open(create=True, migrate=True) as registry:
            yield registry

    @contextmanager
    def upgrading(self, *, migrate: bool) -> Iterator[Registry]:
        """Open the registry whatever its policies are."""
        with self._open(create=False, migrate=migrate) as registry:
            yield registry

    def rows(self, limit: int | None, show_all: bool, default: int) -> int | None:
        """Return how many rows to show; None for all. JSON is complete unless a limit is given."""
        if limit is not None and show_all:
            raise typer.BadParameter("--all and --limit exclude each other.")
        return None if show_all or (self.as_json and limit is None) else limit or default

    def _open(self, *, create: bool, migrate: bool) -> Registry:
        if not self.location:
            raise typer.BadParameter("pass it, or set WEIGHTLEDGER_REGISTRY.", param_hint="--registry")
        with accepting("--registry"):
            check_folder(self.location)
        with accepting("--policy"):
            return Registry.open(self.location, policy=self.policy, create=create, migrate=migrate)

    def _check_policy(self, registry: Registry) -> None:
        known = registry.policies()
        if known and self.policy not in known:
            raise NotFoundError(
                f"no policy {self.policy!r} in the registry {str(registry.location)!r}: "
                f"policies are: {', '.join(known)}; choose one with --policy"
            )


def command(function: Callable[Concatenate[Call, P], Answer]) -> Callable[..., None]:
    """Give a command the shared options, and print what it answers or why it cannot."""

    def run(
        ctx: typer.Context,
        registry: RegistryOption = None,
        policy: PolicyOption = None,
        as_json: JsonOption = False,
        **own: Any,
    ) -> None:
        before: Call = ctx.obj
        call = Call(registry or before.location, policy or before.policy, as_json or before.as_json)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            # Said once each time, whatever the environment makes of warnings.
            warnings.simplefilter("always", UserWarning)
            try:
                answer = function(call, **own)  # type: ignore[call-arg]
            except typer.BadParameter as error:
                error.ctx = error.ctx or ctx
                raise
            except (WeightLedgerError, OSError) as error:
                _show_error(error)
                raise typer.Exit(1) from error
        if call.as_json:
            typer.echo(json.dumps(plain(answer.data), indent=2, allow_nan=False))
        else:
            terminal.show(answer.page())
        raise typer.Exit(answer.exit_code)

    # Shown to Typer as one function with both kinds of options, so that they work after the command's name too.
    shared = list(inspect.signature(run, eval_str=True).parameters.values())[:-1]
    own = list(inspect.signature(function).parameters.values())[1:]
    parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in (*own, *shared)]
    functools.update_wrapper(run, function)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


@contextmanager
def accepting(option: str) -> Iterator[None]:
    """Turn the library's refusal of an argument into a usage error that names the option."""
    try:
        yield
    except WeightLedgerError:
        raise
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint=option) from error


def _show_error(error: BaseException) -> None:
    said = ""
    cause: BaseException | None = error
    while cause is not None:
        text = terminal.printable(str(cause) or type(cause).__name__)
        # A cause that the error quotes already would be said twice.
        if text not in said:
            typer.echo(f"{'  caused by' if said else 'error'}: {text}", err=True)
            said += text
        for note in getattr(cause, "__notes__", ()):
            typer.echo(f"  note: {terminal.printable(note)}", err=True)
        cause = cause.__cause__


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    typer.echo(f"warning: {terminal.printable(str(message))}", err=True)
