"""The errors of weightledger, grouped by what a handler would do about them.

    WeightLedgerError
    ├── NotFoundError        ask for something else: no such version, alias, worker, registry
    ├── ConflictError        look again, then decide: somebody else moved the head
    ├── InvalidWeightsError  mend the weights: nothing was written, no target was touched
    ├── CorruptionError      bytes are not what was stored: fall back to another version
    ├── InUseError           wait, or release what uses it
    ├── SchemaError          upgrade the library or the database
    ├── StorageError         the disk or database refused: make room, mend permissions
    └── SyncError            one or more workers did not confirm their target

Every error carries its whole text as one positional argument, so that it pickles, also through Ray.
The text names the thing, what was expected, what was found, and what to do.
"""


class WeightLedgerError(Exception):
    """Base of everything that weightledger raises on purpose."""


class NotFoundError(WeightLedgerError, LookupError):
    """What was asked for does not exist, or its weights were pruned. The text names what does exist."""


class ConflictError(WeightLedgerError):
    """The head is not where the caller believed it to be. Nothing was changed."""


class InvalidWeightsError(WeightLedgerError, ValueError):
    """Weights or values that cannot be stored, or do not fit their target. Nothing was written or changed."""


class CorruptionError(WeightLedgerError):
    """Stored bytes are missing, cut short, or do not have the digest that was recorded."""


class InUseError(WeightLedgerError):
    """The thing is held by somebody: a pinned alias, a locked policy, a worker steered by another run."""


class SchemaError(WeightLedgerError):
    """The database is not one that this version of the library can use."""


class StorageError(WeightLedgerError):
    """The operating system refused to store or remove something (its own error is the cause), or it was closed."""


class SyncError(WeightLedgerError):
    """Some workers did not confirm their target; the text names each of them and why."""
