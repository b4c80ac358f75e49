"""RLlib on the registry. RLlib is needed only by those who import this package."""

from weightledger.updater.rllib.module import ModuleUpdater
from weightledger.updater.rllib.runner import (
    NO_VERSION,
    STAMP,
    batch_versions,
    policy_of,
    runner_version,
    stamp_samples,
)
from weightledger.updater.rllib.updater import LedgerCallback, RLlibUpdater

__all__ = [
    "NO_VERSION",
    "STAMP",
    "LedgerCallback",
    "ModuleUpdater",
    "RLlibUpdater",
    "batch_versions",
    "policy_of",
    "runner_version",
    "stamp_samples",
]
