"""The updater: brings workers to their target version and records, on their own receipts, what each one holds."""

from weightledger.updater.compat import RemoteWeightUpdaterBase
from weightledger.updater.in_worker.receiver import acting, held_version, receive
from weightledger.updater.messages import ServerWeights
from weightledger.updater.ray_updater import RayRemoteWeightUpdater
from weightledger.updater.reports import Held, SyncReport, WorkerOutcome
from weightledger.updater.telling import SyncWarning
from weightledger.updater.transports.local import LocalTransport
from weightledger.updater.transports.protocol import Transport
from weightledger.updater.updater import Updater
from weightledger.updater.workers.state import Trouble

__all__ = [
    "Held",
    "LocalTransport",
    "RayRemoteWeightUpdater",
    "RemoteWeightUpdaterBase",
    "ServerWeights",
    "SyncReport",
    "SyncWarning",
    "Transport",
    "Trouble",
    "Updater",
    "WorkerOutcome",
    "acting",
    "held_version",
    "receive",
]


def __dir__() -> list[str]:
    return list(__all__)
