"""Which version is a policy's head: the newest stored one, where nobody can doubt which that is."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, func, select

from weightledger.registry.errors import CorruptionError
from weightledger.registry.log import damage
from weightledger.registry.log.models import VERSION_STATES, PolicyRef, VersionRow
from weightledger.registry.log.statements import Statement

_OF_POLICY = VersionRow.policy_id == bindparam("policy")
_NEWEST = Statement(
    select(VersionRow.number, VersionRow.state).where(_OF_POLICY).order_by(VersionRow.number.desc()).limit(1)
)
_STORED = Statement(select(func.max(VersionRow.number)).where(_OF_POLICY, VersionRow.state == "stored"))
_BEYOND = Statement(
    select(VersionRow.number, VersionRow.state).where(_OF_POLICY, VersionRow.number > bindparam("head"))
)


def head_number(conn: Connection, policy: PolicyRef) -> int | None:
    """Return the newest stored version; None while there is none.

    Raises:
        CorruptionError: A newer version has a damaged state, so that nobody can tell which one is the head.
    """
    newest = _NEWEST.first(conn, policy=policy.id)
    if newest is None:
        return None
    number: int | None
    number, state = newest
    if type(number) is int and state == "stored":
        return number
    (number,) = _STORED.first(conn, policy=policy.id)
    check_newest(conn, policy, number)
    return number


def check_newest(conn: Connection, policy: PolicyRef, head: int | None) -> None:
    """Refuse to take a version for the head while a newer one may be it.

    Raises:
        CorruptionError: A newer version's state is damaged.
    """
    doubtful = [
        number
        for number, state in _BEYOND.all(conn, policy=policy.id, head=head or 0)
        if type(number) is not int or state not in VERSION_STATES
    ]
    if doubtful:
        names = ", ".join(f"v{number}" for number in doubtful)
        raise CorruptionError(
            damage.told(conn, [f"{names} of policy {policy.name!r} may be the head, but the row is damaged"])
        )
