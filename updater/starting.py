"""How a training begins on a policy that has versions: what the server weights go on from, said or found out."""

from __future__ import annotations

from typing import Any, Literal, get_args

from weightledger.registry.errors import ConflictError

Start = Literal["head", "new", "continue"]
"""`"head"`: restore the server weights to the head. `"new"`: begin a new line. `"continue"`: they go on from the head
already."""

Origin = Literal["head", "line", "unknown"]
"""What the server weights go on from: the head that the updater knows; nothing, so that the next publish begins a line;
or nobody said."""


def check_start(start: Any) -> Start | None:
    """Refuse what is no way to begin.

    Raises:
        ValueError: it is none.
    """
    if start is not None and start not in get_args(Start):
        ways = ", ".join(map(repr, get_args(Start)))
        raise ValueError(f"start= must be one of {ways}, or None, found {start!r}")
    known: Start | None = start
    return known


def unsaid(policy: str, head: int) -> ConflictError:
    """Return the error of a training that would publish on versions that it has nothing to do with."""
    return ConflictError(
        f"policy {policy!r} has versions up to v{head}, and nobody said that these server weights go on from there; "
        "nothing was published, since untrained weights would reach every worker. Say with start= how this training "
        f'begins: "head" restores the server weights to v{head} and calls on_rollback (adopt() does it now), "new" '
        'begins a new line, "continue" says that the weights were restored already'
    )
