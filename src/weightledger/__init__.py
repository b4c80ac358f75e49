"""A versioned policy-weight registry for reinforcement learning on Ray, with rollback and an audit trail.

`Registry` keeps the versions of a policy. `weightledger.updater` brings them to rollout workers.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightledger.registry import Registry

    __version__: str

__all__ = ["Registry", "__version__"]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    # Either costs an import that most uses of the package do without, so it comes when it is asked for.
    value: Any
    if name == "Registry":
        from weightledger.registry import Registry as value
    elif name == "__version__":
        from importlib.metadata import version

        value = version("weightledger")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
