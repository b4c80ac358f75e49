"""Errors inside of a transaction leave as errors of this library, whatever the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from weightledger.registry.database import CONFUSED
from weightledger.registry.errors import CorruptionError, WeightLedgerError

if TYPE_CHECKING:
    from weightledger.registry.database import Database


@contextmanager
def translated(
    driver: type[Exception],
    as_ours: Callable[[BaseException], WeightLedgerError],
    find_damage: Callable[[], CorruptionError | None],
) -> Iterator[None]:
    """Turn what is raised inside into errors of this library that name the database.

    Args:
        driver: What the database's driver raises.
        as_ours: Says what one of these means.
        find_damage: Looks through the whole record for what may have led code astray.

    Raises:
        CorruptionError: What the code inside met is damage in the record, which is named.
    """
    try:
        yield
    except WeightLedgerError:
        raise
    except (SQLAlchemyError, driver, *CONFUSED) as error:
        # SQLAlchemy wraps what the driver raises, and what is raised where values are converted.
        cause = getattr(error, "orig", None) or error
        if isinstance(cause, WeightLedgerError):
            raise cause from cause.__cause__
        if not isinstance(cause, CONFUSED):
            raise as_ours(cause) from cause
        found = find_damage()
        if found is None:
            # The record is sound, so the code is wrong, and its own error says more.
            raise cause from cause.__cause__
        raise found from cause


def survey(database: Database) -> CorruptionError | None:
    """Look through the whole record; None when it is sound."""
    from weightledger.registry.log import damage

    with database.engine.begin() as connection:
        found = damage.survey(connection)
        return CorruptionError(damage.told(connection, found)) if found else None
