"""The weights that are sent: a stack of linear layers, about as many bytes as asked for.

Used in the learner and inside workers. What a worker holds is read here, without the library that is measured.
"""

from __future__ import annotations

from typing import Any

import torch
from blake3 import blake3
from torch import nn

# (up to so many bytes, layers): small policies have few layers, large ones many.
_SHAPES = ((256 << 10, 4), (4 << 20, 4), (64 << 20, 16), (1 << 62, 64))
# A power of two, so that adding it to numbers below one changes every element exactly.
_STEP = 2.0**-10


class Net(nn.Module):
    """Layers that are only there to be sent; a forward pass touches one number."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        layers = next(count for limit, count in _SHAPES if size <= limit)
        width = max(1, round((size / 4 / layers) ** 0.5))
        with torch.device("meta"):
            stack = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        # The default initialisation would take longer than everything that is measured.
        self.layers = stack.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def __reduce__(self) -> Any:
        # Workers make their own: Ray would keep what is in the arguments of an actor's constructor for as long as the
        # actor lives, a gigabyte a worker.
        return Net, (self.size,)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        first = next(self.parameters())
        return first.reshape(-1)[:1].expand(*observation.shape[:-1], 1)


def make(size: int, *, seed: int = 0) -> Net:
    """Return weights of about so many bytes with random values."""
    net = Net(size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(generator=generator)
    return net


@torch.no_grad()
def change(module: nn.Module) -> None:
    """Change every element, as an optimizer's step does."""
    for parameter in module.parameters():
        parameter.add_(_STEP)


def nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def value(module: nn.Module) -> float:
    """Return one number; `change` changes it."""
    *_, last = module.parameters()
    return float(last.detach().reshape(-1)[-1])


def digest(module: nn.Module) -> str:
    """Return a hash over all bytes, in the order of the parameters."""
    hasher = blake3()
    for parameter in module.parameters():
        hasher.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def tensors(module: nn.Module) -> list[Any]:
    """Return the parameters without their gradients."""
    return [parameter.data for parameter in module.parameters()]
