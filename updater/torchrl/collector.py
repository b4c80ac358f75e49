"""What the adapter does to a `RayCollector` in the driver: which ones it takes, and what it adds to their methods.

Rules kept here
- A collector whose actors cannot be steered is refused when it registers, not by reports that nobody reads.
- The collector itself stays TorchRL's: methods are replaced on this one object, and each calls the one of its class.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from weightledger.updater.torchrl.worker import why_refused

with warnings.catch_warnings():
    # TorchRL warns of its own classes when it makes them.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors.distributed import RayCollector  # type: ignore[import-untyped]


def check_collector(collector: Any) -> None:
    """Refuse a collector whose actors cannot be steered.

    Raises:
        TypeError: it has none, or they collect in a way that leaves no moment for a push.
    """
    if not isinstance(collector, RayCollector):
        raise TypeError(
            f"expected a RayCollector, found a {type(collector).__name__}, which has no Ray actors to be steered"
        )
    if refusal := why_refused(collector.collector_class):
        raise TypeError(refusal)


def in_loop_of(collector: Any) -> bool:
    """Tell whether the collector's own loop is asking, as it does after each batch; else somebody asks by hand.

    TorchRL uses one method for both, and only the stack tells: a generator is on it only while it runs. Where TorchRL
    names its loops otherwise, all calls count as made by hand, so that none is passed by that should not be.
    """
    loops = {
        loop.__code__
        for name in ("_sync_iterator", "_async_iterator")
        if (loop := getattr(type(collector), name, None)) is not None
    }
    frame = sys._getframe(1) if loops else None
    while frame is not None:
        if frame.f_code in loops:
            return True
        frame = frame.f_back
    return False


def before_collecting(collector: Any, begin: Callable[[Any], object]) -> None:
    """Let `begin(collector)` be called before a collector is iterated, in the thread that asks for the frames."""

    def iterator(owner: Any) -> Any:
        # The thread that `start` made is no caller's; `start` itself has called `begin`.
        if threading.current_thread() is not owner._collection_thread:
            begin(owner)
        return type(owner).iterator(owner)

    def start(owner: Any) -> Any:
        begin(owner)
        return type(owner).start(owner)

    _replace(collector, iterator, start)


def after_loading(collector: Any, forget: Callable[[], object]) -> None:
    """Let `forget()` be called after a collector's state was loaded, its policy with it."""

    def load_state_dict(owner: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return type(owner).load_state_dict(owner, *arguments, **options)
        finally:
            forget()

    _replace(collector, load_state_dict)


def around_updates(collector: Any, update: Callable[..., object]) -> None:
    """Let `update(collector, method, *arguments, **options)` stand in for a collector's `update_policy_weights_`."""

    def update_policy_weights_(owner: Any, *arguments: Any, **options: Any) -> Any:
        return update(owner, type(owner).update_policy_weights_, *arguments, **options)

    _replace(collector, update_policy_weights_)


def give_back(collector: Any) -> None:
    """Let a collector be as its class made it."""
    for name in ("iterator", "start", "load_state_dict", "update_policy_weights_"):
        vars(collector).pop(name, None)


def _replace(collector: Any, *methods: Callable[..., Any]) -> None:
    find = weakref.ref(collector)
    for method in methods:

        @functools.wraps(getattr(type(collector), method.__name__))
        def replacement(*arguments: Any, _method: Callable[..., Any] = method, **options: Any) -> Any:
            return _method(find(), *arguments, **options)

        setattr(collector, method.__name__, replacement)
