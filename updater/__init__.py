"""The updater: brings workers to their target version and records, on their own receipts, what each one holds."""

from weightledger.updater.base import RemoteWeightUpdaterBase
from weightledger.updater.core import RayRemoteWeightUpdater
from weightledger.updater.receiver import acting, held_version
from weightledger.updater.reports import Held, SyncReport, WorkerOutcome
from weightledger.updater.server import ServerWeights
from weightledger.updater.telling import SyncWarning

__all__ = [
    "Held",
    "RayRemoteWeightUpdater",
    "RemoteWeightUpdaterBase",
    "ServerWeights",
    "SyncReport",
    "SyncWarning",
    "WorkerOutcome",
    "acting",
    "held_version",
]


def __dir__() -> list[str]:
    return list(__all__)
