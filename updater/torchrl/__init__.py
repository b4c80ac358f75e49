"""TorchRL's `RayCollector` on the registry. TorchRL is needed only by those who import this package."""

from weightledger.updater.torchrl.lineage_mask import lineage_mask
from weightledger.updater.torchrl.updater import RayCollectorWeightSyncScheme, RayCollectorWeightUpdater
from weightledger.updater.torchrl.worker import NO_VERSION, StampBatches

__all__ = [
    "NO_VERSION",
    "RayCollectorWeightSyncScheme",
    "RayCollectorWeightUpdater",
    "StampBatches",
    "lineage_mask",
]
