"""The rows, in the order in which they are measured and shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One line of the contract's numbers."""

    name: str
    measure: str
    """`module:function`; loaded only in the row's own process."""
    title: str
    promise: str
    """What should be reached, in words; empty when it is only looked at."""
    env: Mapping[str, str] = field(default_factory=dict)


ROWS = (
    Row(
        "actors",
        "actors:measure",
        "Publish, durable, and all plain Ray actors confirmed, against ray.put(state_dict) + load_state_dict",
        "",
    ),
    Row(
        "actors-zero-copy",
        "actors:measure_zero_copy",
        "The same with RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1",
        "",
        {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"},
    ),
    Row(
        "torchrl-updater",
        "torchrl:measure_updater",
        "The same on a RayCollector, against TorchRL's RayWeightUpdater (made to wait for its workers)",
        "no slower up to 1 MB, 3 × faster at 16 MB, 5 × from 256 MB; or, where the disk holds it, "
        "≤ 1.25 × (write + fdatasync)",
    ),
    Row(
        "torchrl-scheme",
        "torchrl:measure_scheme",
        "The same on a RayCollector, against TorchRL's default RayWeightSyncScheme, with our disk and without",
        "≤ 1.25 × up to 16 MB, from 256 MB faster or ≤ 1.25 × (write + fdatasync); without the disk no slower, "
        "1.5 × faster at 256 MB, 2.5 × at 1 GB",
    ),
    Row(
        "copies",
        "copies:measure",
        "Publish and confirm without the disk, against plain copies: one in, one out a worker",
        "≤ 1.5 × at 256 MB and 1 GB",
    ),
    Row(
        "durable",
        "durable:measure",
        "Durable publish alone, against write + fdatasync of the same bytes, and safetensors' save_file",
        "≤ 1.25 × from 16 MB; below, ≤ 2 ms more",
    ),
    Row(
        "object-store",
        "objects:measure",
        "Durable publish to an S3 endpoint on loopback, against obstore.put of the same bytes",
        "≤ 1.25 × from 16 MB; below, ≤ 20 ms more, for the database's commit",
    ),
    Row(
        "cache",
        "objects:measure_cache",
        "Verified read of a remote file's copy on disk, against the same from a folder",
        "≤ 1.1 × from 1 MB; below, ≤ 0.2 ms more",
    ),
    Row(
        "held",
        "held:measure",
        "Learner held by update_weights(wait=False), against one memcpy of the weights",
        "≤ 1.5 × from 16 MB; below, ≤ 1 ms more",
    ),
    Row(
        "rollback",
        "rollback:measure",
        "Rollback to a version in the object store, and to one on disk only",
        "≤ 1.2 × (sync + one copy); ≤ 1.3 × (read + sync + one copy)",
    ),
    Row(
        "memory",
        "memory:measure",
        "Private memory during an update, and the object store after many",
        "learner: one copy beyond its weights; store: versions in use × size",
    ),
    Row(
        "audit",
        "audit:measure",
        "Questions to a record of 1 million holdings of 1,000 workers",
        "≤ 20 ms for up to 1,000 rows, growing with the logarithm",
    ),
    Row(
        "many-workers",
        "many_workers:measure",
        "10,000 fake workers planned and recorded; 64 real ones",
        "≤ 0.5 s; cost per worker flat (≤ 1.25 × that of one of 16)",
    ),
    Row(
        "many-tensors",
        "many_tensors:measure",
        "10,000 tensors of 4 KB, against one tensor of the same bytes",
        "≤ 2 ×",
    ),
    Row(
        "proof",
        "proof:measure",
        "Seeing that learner and worker still are what they were proved to be, against the whole update",
        "≤ 0.03 ×",
    ),
    Row(
        "many-versions",
        "many_versions:measure",
        "Publish at 100,000 versions, against publish at 10",
        "as fast (≤ 1.1 ×)",
    ),
    Row(
        "start",
        "start:measure",
        "`weightledger status` from a cold start, import of the registry, first open",
        "status ≤ 0.5 s",
    ),
    Row(
        "nodes",
        "nodes:measure",
        "Bytes that cross to a node in one update, on three nodes",
        "once, however many workers it has",
    ),
    Row(
        "scaling",
        "scaling:measure",
        "The scaling model's constants on this machine, and its predictions against several Ray nodes here",
        "within a factor 1.5 of the prediction",
    ),
)

BY_NAME = {row.name: row for row in ROWS}
