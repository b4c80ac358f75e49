"""Which tensors and arrays can be kept, and why the others cannot.

Rules: a leaf is looked at, never copied or converted. A refusal says what the leaf is and what to do about it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from weightledger.registry.weights.arrays import writable_view
from weightledger.registry.weights.dtypes import TORCH_NAMES

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    code: getattr(torch, name) for code, name in TORCH_NAMES.items() if hasattr(torch, name)
}
CODES: Final[dict[torch.dtype, str]] = {dtype: code for code, dtype in TORCH_DTYPES.items()}

PLAIN_CLASSES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types whose attributes mean what they say; any other one is looked at more closely."""

_DISPATCH: Final = "__torch_dispatch__"  # by name: the type stubs do not know it on a class
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
_PLAIN_DISPATCH: Final = getattr(torch.Tensor, _DISPATCH)


def refusal(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be kept, or None when it can."""
    kind = type(tensor)
    if kind not in PLAIN_CLASSES:
        if is_lazy(tensor):
            return "is not initialised yet: run one forward first"
        if getattr(kind, _DISPATCH) is not _PLAIN_DISPATCH:
            return _wrapper(tensor)
    if _is_functorch_wrapped(tensor):
        return "is a tensor inside of a torch.func transform (vmap, grad): pass it after the transform"
    if tensor.is_meta:
        return "is on the meta device, it has no data: initialise the module first"
    if tensor.is_nested:
        return "is a nested tensor: store its components, for example .unbind()"
    if tensor.is_quantized:
        return f"is a quantised tensor ({tensor.dtype}): store .dequantize(), or .int_repr() with scale and zero point"
    if tensor.layout is not torch.strided:
        return f"has the unsupported layout {tensor.layout}: convert it with .to_dense()"
    if tensor.dtype not in CODES:
        return f"has the dtype {tensor.dtype}, which safetensors cannot hold: convert it{_substitute(tensor.dtype)}"
    return _freed(tensor)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory without the subclass, whose functions might do something else than copy."""
    if type(tensor) in PLAIN_CLASSES:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Look at an array as a tensor over the same memory (a copy where torch cannot: negative strides).

    Raises:
        ValueError: torch has no such element type, or the array's class would be lost; the text says which.
    """
    if type(array) not in (np.ndarray, np.memmap):
        raise ValueError(
            f"is a {type(array).__qualname__}, whose class would be lost: pass np.asarray(...) of it"
        )
    if not array.dtype.isnative:
        raise ValueError(
            f"has the foreign byte order {array.dtype.str}: convert it with .astype('{array.dtype.name}')"
        )
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array).reshape(array.shape)
    try:
        tensor = torch.from_numpy(writable_view(array))
    except (TypeError, ValueError) as error:
        raise ValueError(f"is an array of dtype {array.dtype}, which cannot be kept: convert it") from error
    reason = refusal(tensor)
    if reason is not None:
        raise ValueError(reason)
    return tensor


def same_memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common exactly if they are one: place, shape, strides, type and view bits."""
    bits = (tensor.is_conj(), tensor.is_neg()) if tensor.is_conj() or tensor.is_neg() else ()
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, *bits)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors have one type, one shape and the same bytes: NaN equals itself, 0.0 not -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_row_of_bytes(one), _row_of_bytes(other))


def _row_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return tensor.view(-1).view(torch.uint8)


def end(tensor: torch.Tensor) -> int:
    """Return the address behind a tensor's last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _wrapper(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    if tensor.is_nested:
        return "is a nested tensor: store its components, for example .unbind()"
    name = f"{kind.__module__}.{kind.__qualname__}"
    if hasattr(tensor, "full_tensor"):
        return f"is a {name}, of which each process holds a part: gather to full tensors first, with .full_tensor()"
    return f"is a {name}, a wrapper without plain data of its own: gather to full tensors first, or store its parts"


def _substitute(dtype: torch.dtype) -> str:
    return " with torch.view_as_real" if dtype.is_complex else ""


def _freed(tensor: torch.Tensor) -> str | None:
    if tensor.numel() == 0:
        return None
    if tensor.is_contiguous():
        last = tensor.numel() - 1
    else:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    found = tensor.untyped_storage().nbytes()
    if found >= needed:
        return None
    return f"needs {needed} bytes of storage and has {found}, freed or sharded: gather to full tensors first"
