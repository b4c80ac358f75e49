"""Which incarnation an actor is, asked of Ray's own table: busy workers need not answer. And which actor is this one.

The public state API needs the dashboard, which small runs do not start, so the table is read where Ray keeps it, and so
is the object of this process's actor; this module is the only one that knows how.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message
from ray._private import state
from ray._private.worker import global_worker

from weightledger.updater.in_worker.receiver import incarnation_name
from weightledger.updater.workers.state import Trouble

# One question for all is cheaper than one each from about here on.
_MANY = 16


def actor_name(handle: Any) -> str:
    """Return the name that an actor was made with; empty when it has none."""
    return str(state.actors(_id(handle)).get("Name") or "")


def find_incarnations(handles: Mapping[int, Any]) -> dict[int, str | Trouble]:
    """Return the incarnation of each actor, or why it has none. Actors that are just starting are left out."""
    ids = {key: _id(handle) for key, handle in handles.items()}
    if len(ids) > _MANY:
        table = state.actors()
        rows = {key: table.get(actor) or {} for key, actor in ids.items()}
    else:
        rows = {key: state.actors(actor) for key, actor in ids.items()}
    found = {key: _incarnation(row) for key, row in rows.items()}
    return {key: one for key, one in found.items() if one is not None}


def own_actor(handle: Any) -> Any:
    """Return the object of an actor whose own call is asking, since another call to it would wait for that one.

    Returns:
        None for other actors, and in threads of the actor's own, beside which its calls go on.
    """
    found = global_worker.actors.get(handle._actor_id)
    return found if found is not None and _is_calls_thread() else None


def _is_calls_thread() -> bool:
    if threading.current_thread() is threading.main_thread():
        return True
    # Calls to async actors run in an event loop of their own; those of threaded ones do not wait for each other.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _incarnation(row: Mapping[str, Any]) -> str | Trouble | None:
    match row.get("State"):
        case "ALIVE":
            return incarnation_name(row["ActorID"], row["Address"]["NodeID"], row["Pid"])
        case "DEAD":
            return Trouble("dead", f"the actor is dead: {_cause(row)}")
        case "RESTARTING":
            return Trouble("restarting", "the actor is being restarted")
        case _:
            return None


def _cause(row: Mapping[str, Any]) -> str:
    cause = row.get("DeathCause")
    if isinstance(cause, Message):
        # One of several kinds of context is set; each that tells more than its name has a message.
        for _, context in cause.ListFields():
            message = getattr(context, "error_message", "")
            if message:
                return " ".join(message.split())[:300]
            # An actor whose __init__ raised: the last line of the traceback is what it raised.
            trace = getattr(context, "formatted_exception_string", "").strip()
            if trace:
                return f"it could not be made: {trace.splitlines()[-1][:300]}"
    return "no cause given"


def _id(handle: Any) -> str:
    return str(handle._actor_id.hex())
