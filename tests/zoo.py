"""Modules as people have them: torch's own, tensordict's, TorchRL's, RLlib's, and some that people write.

Each comes with a way to make it, to change what it computes with, and to use it. What it holds is read from its parts,
never from its state dict.
"""

# The stubs of these libraries know few of their attributes, and hardly any that are set while running.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportPrivateImportUsage=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torchrl.modules as rl
from ray.rllib.algorithms.dqn.dqn_catalog import DQNCatalog
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.algorithms.ppo.ppo_catalog import PPOCatalog
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.algorithms.sac.sac_catalog import SACCatalog
from ray.rllib.algorithms.sac.torch.default_sac_torch_rl_module import DefaultSACTorchRLModule
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import fusion, parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrl.data import Bounded, Categorical
from torchrl.envs.transforms import ObservationNorm, VecNorm, VecNormV2
from torchrl.objectives import ClipPPOLoss, SACLoss


@dataclass(frozen=True)
class Specimen:
    """One kind of module."""

    make: Callable[[], Any]
    use: Callable[[Any], Any]
    """Computes something with it; tensors, nested or not."""
    change: Callable[[Any], None]
    refused: str = ""
    """What the error says of a module that cannot be published."""


def held(module: Any) -> str:
    """Hash every tensor that a module computes with, by the names that its parts give them."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        every = [*part._parameters.items(), *part._buffers.items()]
        if isinstance(part, TensorDictParams):
            every += part.flatten_keys(".").items()
        found |= {f"{prefix}/{name}": tensor for name, tensor in every if tensor is not None}
    total = hashlib.sha256()
    for name, tensor in sorted(found.items()):
        total.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(
            tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return total.hexdigest()


def said(answer: Any) -> list[Any]:
    """Return the numbers in an answer."""
    if isinstance(answer, Tensor):
        return [answer.dtype, answer.detach().tolist()]
    if hasattr(answer, "flatten_keys"):
        answer = dict(answer.flatten_keys(".").items())
    if isinstance(answer, dict):
        return [(str(key), said(answer[key])) for key in sorted(answer, key=str)]
    if isinstance(answer, (list, tuple)):
        return [said(part) for part in answer]
    return [repr(answer)]


def shift(module: Any) -> None:
    """Change every tensor that is kept, in place, to something that is still sound (variances stay positive)."""
    loose = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in getattr(part, "_non_persistent_buffers_set", ())
    }
    tensors = [*module.named_parameters(), *module.named_buffers()]
    with torch.no_grad():
        for name, tensor in tensors:
            if name in loose or tensor.dtype == torch.bool or not tensor.numel():
                continue
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.mul_(1.25).add_(0.125)
            else:
                tensor.add_(1)


ZOO: dict[str, Specimen] = {}


def born(name: str, seed: int) -> Any:
    """Make one of the zoo, the same for the same seed; uses do not change it."""
    torch.manual_seed(seed)
    with torch.no_grad():  # what some derive at once would be bound to a graph
        module = ZOO[name].make()
    return module.eval() if isinstance(module, nn.Module) else module


def truth(name: str, module: Any) -> list[Any]:
    """Return what a module holds and what it computes."""
    with torch.no_grad():
        return [held(module), said(ZOO[name].use(module))]


def add(
    name: str,
    make: Callable[[], Any],
    *inputs: Any,
    use: Callable[[Any], Any] | None = None,
    change: Callable[[Any], None] = shift,
    refused: str = "",
) -> None:
    ZOO[name] = Specimen(make, use or (lambda module: module(*inputs)), change, refused)


def rows(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, int(np.prod(shape))).view(shape)


def whole(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


# ---------------------------------------------------------------------- torch: layers


class Custom(nn.Module):
    """Puts parts together, and says how they are used."""

    def __init__(self, forward: Callable[..., Any], /, **parts: Any) -> None:
        super().__init__()
        self._use = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self._use(self, *inputs)


def tied() -> nn.Module:
    module = Custom(
        lambda self, x: self.head(self.embed(x)), embed=nn.Embedding(5, 3), head=nn.Linear(3, 5, bias=False)
    )
    module.head.weight = module.embed.weight
    return module


class Buffered(nn.Module):
    """Buffers that are kept, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * self.count


class Mixed(nn.Module):
    """Every type, and a parameter that looks at its memory the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.ones(3, dtype=torch.float16))
        self.brain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.long = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.waves = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(2, 3).t())
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("steps", torch.tensor([1, 2], dtype=torch.int16))

    def forward(self) -> list[Tensor]:
        return [self.short * 2, self.brain * 2, self.long * 2, self.waves.abs(), self.turned * 2, self.steps]


TRANSFORMER = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}

add("linear", lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), rows(2, 3))
add("bilinear", lambda: nn.Bilinear(2, 3, 2), rows(2, 2), rows(2, 3))
add("prelu", lambda: nn.PReLU(3), rows(2, 3))
add("convolutions", lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ConvTranspose2d(2, 1, 2)), rows(1, 1, 5, 5))
add("batch norm", lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)), rows(2, 1, 4, 4))
add("instance norm", lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True), rows(2, 2, 3))
add("layer norm", lambda: nn.LayerNorm(4), rows(2, 4))
add("group norm", lambda: nn.GroupNorm(2, 4), rows(2, 4, 3))
add("rms norm", lambda: nn.RMSNorm(4), rows(2, 4))
add("embedding", lambda: nn.Embedding(4, 3, padding_idx=0), whole(0, 2, 3))
add("embedding bag", lambda: nn.EmbeddingBag(4, 3, mode="sum"), whole(0, 2, 3), whole(0, 1))
add("lstm", lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), rows(2, 5, 3))
add("gru", lambda: nn.GRU(3, 4, batch_first=True), rows(2, 5, 3))
add("lstm cell", lambda: nn.LSTMCell(3, 4), rows(2, 3))
add(
    "attention",
    lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    rows(1, 3, 4),
    rows(1, 3, 4),
    rows(1, 3, 4),
)
add(
    "transformer encoder",
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**TRANSFORMER), 2),
    rows(1, 3, 8),
)
add(
    "transformer",
    lambda: nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **TRANSFORMER),
    rows(1, 3, 8),
    rows(1, 2, 8),
)
add(
    "adaptive softmax",
    lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3]),
    use=lambda m: m.log_prob(rows(2, 4)),
)
add("every type", Mixed)
add("buffers", Buffered, rows(2, 3))
add("tied weights", tied, whole(0, 2, 3))
add(
    "containers of parameters and modules",
    lambda: Custom(
        lambda self, x: sum(self.more["b"](x) * each for each in (*self.list, *self.named.values())),
        list=nn.ParameterList([torch.ones(2), torch.ones(1)]),
        named=nn.ParameterDict({"x": torch.ones(2)}),
        more=nn.ModuleDict({"b": nn.ModuleList([nn.Linear(3, 2)])[0]}),
    ),
    rows(2, 3),
)

# ---------------------------------------------------------------------- torch: wrappers and reparametrisations


class Doubling(nn.Module):
    """A parametrisation of one's own, which knows the way back."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


def parametrized() -> nn.Module:
    module = nn.Linear(3, 3)
    parametrize.register_parametrization(module, "weight", Doubling())
    return module


def pruned() -> nn.Module:
    module = nn.Linear(3, 3)
    prune.l1_unstructured(module, "weight", amount=0.5)
    return module


def averaged() -> nn.Module:
    model = nn.Linear(3, 2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(model)
    average.update_parameters(nn.Linear(3, 2))
    return average


def lazy() -> nn.Module:
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))
    module.eval()(rows(2, 3))
    return module


def fake_quantised() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    module.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    module = torch.ao.quantization.prepare_qat(module.train())
    module(rows(4, 3))
    return module.apply(torch.ao.quantization.disable_observer)


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(3, 2)), {nn.Linear}, dtype=torch.qint8
    )


class LoRA(nn.Module):
    """A frozen base and a low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 4).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.zeros(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


add("weight norm", lambda: parametrizations.weight_norm(nn.Linear(3, 2)), rows(2, 3))
add("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(3, 2)), rows(2, 3))
add("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(3, 3)), rows(2, 3))
add("a parametrisation of one's own", parametrized, rows(2, 3))
add("old weight norm", lambda: nn.utils.weight_norm(nn.Linear(3, 2)), rows(2, 3))
add("old spectral norm", lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), rows(2, 3))
add("pruned", pruned, rows(2, 3))
add("averaged", averaged, rows(2, 3))
add("lazy, initialised", lazy, rows(2, 3))
add(
    "lazy, not initialised",
    lambda: nn.Sequential(nn.LazyLinear(4)),
    refused="'0.weight' is not initialised yet",
)
add("data parallel", lambda: nn.DataParallel(nn.Linear(3, 2)), rows(2, 3))
add("compiled", lambda: torch.compile(nn.Sequential(nn.Linear(3, 2)), backend="eager"), rows(2, 3))
add("a compiled part", lambda: nn.Sequential(torch.compile(nn.Linear(3, 2), backend="eager")), rows(2, 3))
add("scripted", lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))), rows(2, 3))
add("traced", lambda: torch.jit.trace(nn.Linear(3, 2), rows(2, 3)), rows(2, 3))
add("graph module", lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.GELU())), rows(2, 3))
add(
    "fused convolution",
    lambda: fusion.fuse_conv_bn_eval(nn.Conv2d(1, 2, 2).eval(), nn.BatchNorm2d(2).eval()),
    rows(1, 1, 4, 4),
)
add("fused linear", lambda: torch.ao.nn.intrinsic.LinearReLU(nn.Linear(3, 2), nn.ReLU()), rows(2, 3))
add("made for quantisation", fake_quantised, rows(2, 3), change=lambda m: shift(nn.ModuleList([m[0], m[2]])))
add("quantised", quantised, refused="_packed_params")
add("checkpoint wrapper", lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(3, 2))), rows(2, 3))
add("low-rank adapter", LoRA, rows(2, 3))

# ---------------------------------------------------------------------- torch: state of one's own


class Stateful(nn.Module):
    """Keeps extra state beside its weights."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state

    def forward(self, x: Tensor) -> Any:
        return {"y": x * self.weight, "state": self.state}


class Scaled(Stateful):
    """Its extra state is one of its own buffers."""

    def __init__(self) -> None:
        super().__init__(None)
        self.register_buffer("scale", torch.ones(2), persistent=False)

    def get_extra_state(self) -> Tensor:
        return self.scale

    def set_extra_state(self, state: Tensor) -> None:
        self.scale.copy_(state)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


def restate(state: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        shift(module)
        module.state = state

    return change


def rescale(module: Any) -> None:
    with torch.no_grad():
        module.scale.add_(1)
        module.weight.add_(1)


add(
    "extra state, a dictionary",
    lambda: Stateful({"seen": 1, "scale": torch.ones(2), "names": ["a"]}),
    rows(2),
    change=restate({"seen": 5, "scale": torch.zeros(3), "names": []}),
)
add("extra state, a tensor", lambda: Stateful(torch.arange(3)), rows(2), change=restate(torch.zeros(1)))
add("extra state, a buffer", Scaled, rows(2), change=rescale)


class Renaming(nn.Linear):
    """Shows its parameters under names of an older version, and takes these."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_state_dict_post_hook(self.rename)
        self.register_load_state_dict_pre_hook(self.rename_back)

    @staticmethod
    def rename(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight")

    @staticmethod
    def rename_back(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "kernel")


class Split(nn.Module):
    """One packed projection, shown and taken as three, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 6, bias=False)
        self.register_state_dict_post_hook(self.split)
        self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def split(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        packed = state.pop(f"{prefix}qkv.weight")
        for name, part in zip("qkv", packed.split(2), strict=True):
            state[f"{prefix}{name}.weight"] = part

    @staticmethod
    def join(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}qkv.weight"] = torch.cat([state.pop(f"{prefix}{name}.weight") for name in "qkv"])

    def forward(self, x: Tensor) -> Tensor:
        return self.qkv(x)


class SplitCopies(Split):
    """As `Split`; what it shows are copies."""

    @staticmethod
    def split(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        packed = state.pop(f"{prefix}qkv.weight")
        for at, name in enumerate("qkv"):
            state[f"{prefix}{name}.weight"] = packed[2 * at : 2 * at + 2].clone()


class Outside(nn.Module):
    """Holds a module that it does not register, and speaks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = [nn.Linear(3, 2)]

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.inner[0].state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return self.inner[0].load_state_dict(*args, **options)

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return self.inner[0].named_parameters(*args, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x)


class Derived(nn.Linear):
    """Computes with what it derived when it was loaded last."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_load_state_dict_post_hook(lambda module, keys: module.derive())
        self.derive()

    def derive(self) -> None:
        self.derived = self.weight.detach().clone() * 3

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.derived.t() + self.bias


class Metric(nn.Module):
    """Keeps its state in plain attributes, as metrics do, and saves and loads it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "total"] = self.total.detach()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.total = state.pop(prefix + "total")
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.total


def count(module: Any) -> None:
    shift(module)
    module[1].total = module[1].total + 1


def rederive(module: Any) -> None:
    shift(module)
    module.derive()


add("names of an older version", Renaming, rows(2, 3))
add("a packed projection, shown in parts", Split, rows(2, 3))
add("a packed projection, shown in copies", SplitCopies, rows(2, 3))
add("a part that is not registered", Outside, rows(2, 3))
add("copies in a part's state", lambda: nn.Sequential(nn.Linear(3, 3), SplitCopies()), rows(2, 3))
add("a metric", lambda: nn.Sequential(nn.Linear(3, 2), Metric()), rows(2, 3), change=count)
add("derived when loaded", Derived, rows(2, 3), change=rederive)

# ---------------------------------------------------------------------- tensordict


def gaussian(width: int = 3) -> ProbabilisticTensorDictSequential:
    net = nn.Sequential(nn.Linear(width, 4), rl.NormalParamExtractor())
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"], out_keys=["action"], distribution_class=rl.TanhNormal
        ),
    )


def seen(**entries: Any) -> TensorDict:
    return TensorDict(entries, batch_size=[2])


def with_params() -> nn.Module:
    params = TensorDictParams(TensorDict({"a": torch.ones(3), "b": {"c": torch.ones(2, 3)}}))
    return Custom(
        lambda self, x: x * self.params["a"] + self.params["b", "c"], params=params, own=nn.Linear(1, 1)
    )


OBSERVED = {"observation": rows(2, 3)}

add(
    "tensordict module",
    lambda: TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"]),
    use=lambda m: m(seen(**OBSERVED)),
)
add(
    "tensordict sequence",
    lambda: TensorDictSequential(
        TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["hidden"]),
        TensorDictModule(nn.LayerNorm(2), in_keys=["hidden"], out_keys=["action"]),
    ),
    use=lambda m: m(seen(**OBSERVED)),
)
add(
    "tensordict, a distribution", gaussian, use=lambda m: m.get_dist(seen(**OBSERVED)).base_dist.base_dist.loc
)
add("tensordict parameters in a module", with_params, rows(2, 3))
add(
    "tensordict parameters",
    lambda: TensorDictParams(TensorDict.from_module(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))),
    use=lambda m: dict(m.flatten_keys(".").items()),
)

# ---------------------------------------------------------------------- TorchRL


def actor_critic() -> rl.ActorValueOperator:
    return rl.ActorValueOperator(
        TensorDictModule(nn.Linear(3, 4), in_keys=["observation"], out_keys=["hidden"]),
        TensorDictModule(nn.Linear(4, 2), in_keys=["hidden"], out_keys=["action"]),
        rl.ValueOperator(nn.Linear(4, 1), in_keys=["hidden"]),
    )


def greedy() -> nn.Module:
    actions = Categorical(3)
    return TensorDictSequential(
        rl.QValueActor(nn.Linear(3, 3), spec=actions),
        rl.EGreedyModule(spec=actions, annealing_num_steps=10),
    )


def anneal(module: Any) -> None:
    shift(module[0])
    module[1].step(3)


def recurrent(kind: Any, states: int) -> nn.Module:
    kinds = ["recurrent_state_h", "recurrent_state_c"][:states]
    return kind(
        input_size=3,
        hidden_size=4,
        in_keys=["observation", *kinds],
        out_keys=["hidden", *(("next", name) for name in kinds)],
    )


def recur(module: Any) -> Any:
    states = {name: torch.zeros(2, 1, 4) for name in ("recurrent_state_h", "recurrent_state_c")}
    starts = torch.zeros(2, 1, dtype=torch.bool)
    return module(seen(**OBSERVED, **states, is_init=starts))["hidden"]


def observe(module: Any) -> None:
    data = TensorDict({"observation": torch.randn(4, 3)}, [4])
    module._step(data.clone(), data)


def normaliser(kind: Any, **options: Any) -> nn.Module:
    module = kind(in_keys=["observation"], **options)
    observe(module)
    return module


class Joined(nn.Linear):
    """Takes observation and action as one row."""

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return super().forward(torch.cat([observation, action], -1))


def sac_loss() -> nn.Module:
    actor = rl.ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(nn.Linear(3, 4), rl.NormalParamExtractor()), ["observation"], ["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=rl.TanhNormal,
        spec=Bounded(-1, 1, (2,)),
    )
    loss = SACLoss(actor, rl.ValueOperator(Joined(5, 1), in_keys=["observation", "action"]))
    loss.state_dict()  # makes a buffer at the first look
    return loss


def everything(module: Any) -> Any:
    return dict(module.state_dict())


CNN = {"in_features": 1, "num_cells": [2], "kernel_sizes": 2, "strides": 1}

add("mlp", lambda: rl.MLP(in_features=3, out_features=2, num_cells=[4]), rows(2, 3))
add("mlp, lazy", lambda: rl.MLP(out_features=2, num_cells=[4]), refused="is not initialised yet")
add("convolutional", lambda: rl.ConvNet(in_features=1, num_cells=[2], kernel_sizes=2), rows(1, 1, 4, 4))
add("noisy linear", lambda: rl.NoisyLinear(3, 2), rows(2, 3))
add("actor and critic", actor_critic, use=lambda m: m(seen(**OBSERVED)))
add(
    "duelling",
    lambda: rl.DuelingCnnDQNet(2, cnn_kwargs=CNN, mlp_kwargs={"in_features": 18, "num_cells": [4]}),
    rows(1, 1, 4, 4),
)
add("epsilon-greedy", greedy, use=lambda m: [m[0](seen(**OBSERVED))["action_value"], m[1].eps], change=anneal)
add("lstm module", lambda: recurrent(rl.LSTMModule, 2), use=recur)
add("gru module", lambda: recurrent(rl.GRUModule, 1), use=recur)
add("batch renorm", lambda: rl.BatchRenorm1d(3), rows(2, 3))
add(
    "several agents",
    lambda: rl.MultiAgentMLP(3, 2, 2, centralized=False, share_params=False, depth=1),
    rows(2, 2, 3),
)
add("mixer", lambda: rl.QMixer((4,), 2, 2, "cpu"), rows(1, 2, 1), rows(1, 4))
add("value norm", lambda: rl.PopArtValueNorm(), use=lambda m: m.normalize(rows(3, 1)))
add(
    "block gru",
    lambda: rl.DreamerV3BlockGRUCell(3, 8, num_blocks=2, projection_size=4),
    rows(2, 3),
    rows(2, 8),
)
add("vecnorm", lambda: normaliser(VecNormV2), use=lambda m: m.get_extra_state(), change=observe)
add(
    "old vecnorm",
    lambda: normaliser(VecNorm, new_api=False),
    use=lambda m: m.get_extra_state(),
    change=observe,
)
add(
    "observation norm",
    lambda: ObservationNorm(torch.zeros(3), torch.ones(3), ["observation"]),
    use=everything,
)
add(
    "ppo loss",
    lambda: ClipPPOLoss(gaussian(), rl.ValueOperator(nn.Linear(3, 1), in_keys=["observation"])),
    use=everything,
)
add("sac loss", sac_loss, use=everything)

# ---------------------------------------------------------------------- RLlib

SPACE = gym.spaces.Box(-1, 1, (3,), np.float32)
DISCRETE, CONTINUOUS = gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (2,), np.float32)


def rllib(kind: Any, catalog: Any, actions: gym.Space[Any], model: Any, **options: Any) -> Any:
    return kind(
        observation_space=SPACE,
        action_space=actions,
        model_config=model,
        catalog_class=catalog,
        **options,
    )


def infer(module: Any) -> Any:
    batch: dict[str, Any] = {"obs": rows(2, 3)}
    if module.is_stateful():
        state = module.get_initial_state()
        batch = {
            "obs": rows(2, 1, 3),
            "state_in": {key: torch.as_tensor(value).expand(2, *value.shape) for key, value in state.items()},
        }
    return module.forward_inference(batch)


def values_of(module: Any) -> Any:
    return module.compute_q_values({"obs": rows(2, 3)})


NET = asdict(DefaultModelConfig(fcnet_hiddens=[4]))
RECURRENT = NET | {"use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 2}
DQN = {
    "fcnet_hiddens": [4],
    "head_fcnet_hiddens": [4],
    "epsilon": 0.1,
    "double_q": True,
    "dueling": True,
    "num_atoms": 1,
}
SAC = {"fcnet_hiddens": [4], "head_fcnet_hiddens": [4], "twin_q": True}

add("rllib ppo", lambda: rllib(DefaultPPOTorchRLModule, PPOCatalog, DISCRETE, NET), use=infer)
add(
    "rllib ppo, recurrent",
    lambda: rllib(DefaultPPOTorchRLModule, PPOCatalog, CONTINUOUS, RECURRENT),
    use=infer,
)
add(
    "rllib ppo, for inference",
    lambda: rllib(DefaultPPOTorchRLModule, PPOCatalog, DISCRETE, NET, inference_only=True),
    use=infer,
)
add("rllib dqn", lambda: rllib(DefaultDQNTorchRLModule, DQNCatalog, DISCRETE, DQN), use=values_of)
add("rllib sac", lambda: rllib(DefaultSACTorchRLModule, SACCatalog, CONTINUOUS, SAC), use=infer)
