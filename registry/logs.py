"""The library's logger. It is silent until the host gives it a handler or a level.

`INFO` tells of publishes, rollbacks, followed heads, restarts of workers, recoveries and retries, `WARNING` of failures
that nobody is told of otherwise, `DEBUG` of steps.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from weightledger.registry.records import Version

log: Final = logging.getLogger("weightledger")
log.addHandler(logging.NullHandler())


def tell_published(policy: str, number: int) -> None:
    """Log that a version became the head."""
    log.info("v%d of policy %r is published", number, policy)


def tell_rolled_back(version: Version) -> None:
    """Log that a rollback became the head."""
    why = f" ({version.message})" if version.message else ""
    log.info(
        "v%d of policy %r is published: it restores v%d%s",
        version.number,
        version.policy,
        version.restores,
        why,
    )
