"""The registry: what versions exist, what should run, and who held what."""

from weightledger.registry.core import Registry
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
