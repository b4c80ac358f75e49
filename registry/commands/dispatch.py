"""What all commands share: where to look, how to open it, how to answer, how to say that something is refused.

Rules
- Reading opens a registry as it is, writing may migrate it, only publishing makes one.
- What the library refuses is one line on stderr and its causes, exit code 1; an argument that cannot be read is exit
  code 2. Nobody is shown how the code came there: `WEIGHTLEDGER_TRACEBACK=1` does, for those who mend it.
- What a damaged row left out of an answer is told on stderr, exit code 1; the rest is answered.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from weightledger.registry.commands import terminal
from weightledger.registry.commands.terminal import Block
from weightledger.registry.core import Registry
from weightledger.registry.database import CONFUSED
from weightledger.registry.errors import NotFoundError, WeightLedgerError
from weightledger.registry.places import check_location
from weightledger.registry.records import Record, plain

_NAMED = 3  # so many damaged rows are named on stderr

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
    missing: Sequence[str] = ()
    """What could not be read, beside the records that say so themselves."""


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
    def upgrading(self) -> Iterator[Registry]:
        """Open the registry whatever its policies are."""
        with self._open(create=False, migrate=False) as registry:
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
            check_location(self.location)
        with accepting("--policy"):
            return Registry.open(self.location, policy=self.policy, create=create, migrate=migrate)

    def _check_policy(self, registry: Registry) -> None:
        with registry.ledger.reading() as conn:
            if registry.ledger.find_policy(conn) is not None:
                return
        known = registry.policies()
        if known:
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
            with _refusals(ctx):
                answer = function(call, **own)  # type: ignore[call-arg]
                text = json.dumps(plain(answer.data), indent=2, allow_nan=False) if call.as_json else ""
                page = [] if call.as_json else answer.page()
                damaged = [*answer.missing, *_damaged(answer.data)]
        if call.as_json:
            terminal.write(text)
        else:
            terminal.show(page)
        if damaged:
            _show_damage(damaged)
        raise typer.Exit(1 if damaged else answer.exit_code)

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


@contextmanager
def _refusals(ctx: typer.Context) -> Iterator[None]:
    """Say what is refused, and end with the exit code for it."""
    try:
        yield
    except typer.BadParameter as error:
        error.ctx = error.ctx or ctx
        raise
    except (WeightLedgerError, OSError) as error:
        _show_error(error)
        raise typer.Exit(1) from error
    except Exception as error:
        if isinstance(error, ValueError) and type(error) is ValueError:
            raise typer.BadParameter(f"{error}.", ctx=ctx) from error
        if os.environ.get("WEIGHTLEDGER_TRACEBACK"):
            raise
        _show_error(
            error, what=f"this is a fault of weightledger, please report it: {type(error).__name__}: {error}"
        )
        raise typer.Exit(1) from error


def _damaged(data: Any) -> Iterator[str]:
    """Yield what is damaged of the records in an answer."""
    if isinstance(data, Record):
        if damage := getattr(data, "damage", ""):
            yield damage
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from _damaged(item)
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from _damaged(item)


def _show_damage(damaged: Sequence[str]) -> None:
    named = list(dict.fromkeys(damaged))
    more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    terminal.complain(
        f"error: the record is damaged, and not all of the answer could be read: {'; '.join(named[:_NAMED])}{more}. "
        "`weightledger verify` lists every damaged row."
    )


def _show_error(error: BaseException, what: str = "") -> None:
    said = ""
    cause: BaseException | None = error
    while cause is not None:
        text = what if what and cause is error else str(cause) or type(cause).__name__
        # A cause that the error quotes already would be said twice; one of code that met damage says nothing to people.
        quoted = (cause.strerror if isinstance(cause, OSError) else None) or text
        if cause is error or not (quoted in said or _is_confusion(cause)):
            terminal.complain(f"{'  caused by' if said else 'error'}: {text}")
            said += text
        for note in getattr(cause, "__notes__", ()):
            terminal.complain(f"  note: {note}")
        cause = cause.__cause__


def _is_confusion(cause: BaseException) -> bool:
    return isinstance(cause, CONFUSED) and not isinstance(cause, WeightLedgerError)


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    terminal.complain(f"warning: {message}")
