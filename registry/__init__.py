"""The registry: what versions exist, what should run, and who held what."""

from typing import TYPE_CHECKING, Any

from weightledger.registry.errors import (
    ConflictError,
    CorruptionError,
    InUseError,
    InvalidWeightsError,
    NotFoundError,
    SchemaError,
    StorageError,
    SyncError,
    WeightLedgerError,
)
from weightledger.registry.records import (
    Event,
    Fault,
    Holding,
    Pin,
    PruneReport,
    Version,
    WorkerStatus,
)

if TYPE_CHECKING:
    from weightledger.registry.core import Registry

__all__ = [
    "ConflictError",
    "CorruptionError",
    "Event",
    "Fault",
    "Holding",
    "InUseError",
    "InvalidWeightsError",
    "NotFoundError",
    "Pin",
    "PruneReport",
    "Registry",
    "SchemaError",
    "StorageError",
    "SyncError",
    "Version",
    "WeightLedgerError",
    "WorkerStatus",
]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    # `Registry` brings the database along. It comes when it is asked for, so that the command line is at work before.
    if name != "Registry":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weightledger.registry.core import Registry

    globals()[name] = Registry
    return Registry
