"""Weights and bytes: named tensors, their digest, one payload, and the way back into live targets.

Other packages use what is named here. Each name brings its module along when it is asked for, so that `Registry` can be
imported without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightledger.registry.weights.codec import Content, flatten, flatten_extra, rebuild
    from weightledger.registry.weights.digest import content_digest
    from weightledger.registry.weights.fitting import Plan
    from weightledger.registry.weights.layout import Opening
    from weightledger.registry.weights.names import is_allowed
    from weightledger.registry.weights.packing import Packer
    from weightledger.registry.weights.payload import Payload, parse
    from weightledger.registry.weights.restore import (
        NotPutBackError,
        check_fit,
        copy_into,
        live_digest,
    )
    from weightledger.registry.weights.reuse import Flattener
    from weightledger.registry.weights.watch import Watch, matches_any, written_by_forward

_HOMES = {
    "codec": ("Content", "flatten", "flatten_extra", "rebuild"),
    "digest": ("content_digest",),
    "fitting": ("Plan",),
    "layout": ("Opening",),
    "names": ("is_allowed",),
    "packing": ("Packer",),
    "payload": ("Payload", "parse"),
    "restore": ("NotPutBackError", "check_fit", "copy_into", "live_digest"),
    "reuse": ("Flattener",),
    "watch": ("Watch", "matches_any", "written_by_forward"),
}

__all__ = [
    "Content",
    "Flattener",
    "NotPutBackError",
    "Opening",
    "Packer",
    "Payload",
    "Plan",
    "Watch",
    "check_fit",
    "content_digest",
    "copy_into",
    "flatten",
    "flatten_extra",
    "is_allowed",
    "live_digest",
    "matches_any",
    "parse",
    "rebuild",
    "written_by_forward",
]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found
