"""Facts of the model: its weights by group, its modes, and what passes it is given.

Axes, in this file:  T token.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.sites import Anatomy, named, unwrapped
from equipoise.probes.capture import autocast_left
from equipoise.probes.protocols import Emit, Guarded
from equipoise.probes.stored_batch import tensors_of

DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
RATES = ("dropout", "attention_dropout", "attn_dropout", "dropout_p", "attn_pdrop")
"""Attributes in which modules that call dropout as a function keep its rate."""
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
ADAPTERS = ("lora_", "adapter", "ia3_", "prompt_")
REMEMBERED = 8
"""Passes of a step that are told apart by their inputs."""


@dataclass(slots=True)
class _Products:
    """Outputs of linear layers in a pass whose caller entered autocast."""

    wanted: dict[str, torch.dtype]
    seen: int = 0
    cast: int = 0

    def on_linear(self, module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        dtype = self.wanted.get(output.device.type)
        if dtype is None or dtype == torch.float32:
            return
        self.seen += 1
        self.cast += output.dtype == dtype


@dataclass(slots=True)
class ModelFacts:
    """State weights by group, train and eval mode, dropout, autocast and passes."""

    name: str = "model"
    _anatomy: Anatomy | None = None
    _weights: dict[str, Any] = field(default_factory=dict)
    _modes: dict[str, Any] = field(default_factory=dict)
    _products: _Products | None = None
    _trained: bool = False
    _passes: list[dict[str, Any]] = field(default_factory=list)

    def begin_step(self, step: int) -> None:
        """Forget the last sampled step."""
        self._modes, self._products, self._passes = {}, None, []
        self._trained = False

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        if self._anatomy is not anatomy:
            self._anatomy, self._weights = anatomy, _weights(anatomy)
        if not self._modes:
            self._modes = _modes(anatomy.model)
        wanted = autocast_left()
        if wanted and self._products is None:
            self._products = _Products(dict(wanted))
            for _, module in named(anatomy.model):
                if isinstance(module, nn.Linear):
                    yield hooks.after(module, guarded(self._products.on_linear))

    def on_call(
        self, module: nn.Module, args: Any, kwargs: Any, *, graded: bool
    ) -> None:
        """Note a pass: whether it can be trained by, its mode and its inputs."""
        if len(self._passes) < REMEMBERED:
            modes = _modes(module)
            self._passes.append(
                {
                    "graded": graded,
                    "training": modes["training"],
                    "dropout": modes["dropout"],
                    "inputs": _fingerprint((args, kwargs)),
                }
            )

    def on_gradients(
        self, anatomy: Anatomy, emit: Emit, *, scale: Tensor | None
    ) -> None:
        """Note that the pass was trained by."""
        self._trained = True

    def facts(self) -> Mapping[str, Any]:
        """Return the facts of the step."""
        found: dict[str, Any] = {**self._weights, **self._modes}
        if self._modes:
            found["trained"] = self._trained
        if self._passes:
            found["passes"] = self._passes
        if self._products is not None and self._products.seen:
            one = self._products
            wanted = next(iter(one.wanted.values()))
            found["autocast"] = {
                "wanted": str(wanted).removeprefix("torch."),
                "products": one.seen,
                "cast": one.cast,
            }
        return found


def _modes(model: nn.Module) -> dict[str, Any]:
    """Return the mode of the model, and of its modules that drop numbers."""
    active = idle = 0
    averages = False
    for _, module in named(model):
        averages |= isinstance(module, nn.modules.batchnorm._NormBase)
        if _rate(module) > 0:
            active, idle = active + module.training, idle + (not module.training)
    training = core(unwrapped(model)).training
    modes = {"training": training, "dropout": active, "dropout_idle": idle}
    return {**modes, "batch_norm": averages}


def core(model: nn.Module) -> nn.Module:
    """Return the module that holds all weights, inside those that only pass it on."""
    while True:
        holding = [m for m in model.children() if any(True for _ in m.parameters())]
        if len(holding) != 1 or any(True for _ in model.parameters(recurse=False)):
            return model
        model = holding[0]


def _rate(module: nn.Module) -> float:
    """Return the largest share of numbers that a module says it drops."""
    if isinstance(module, DROPOUT):
        return float(module.p)
    values = (module.__dict__.get(name) for name in RATES)
    return max((v for v in values if isinstance(v, int | float)), default=0.0)


def _fingerprint(given: Any) -> Tensor:
    """Return two numbers that differ where the first tensors of two passes do."""
    tensors = tensors_of(given)
    if not tensors:
        return torch.zeros(2)
    with torch._C.DisableTorchFunction():
        x = tensors[0].detach().reshape(-1)[: 1 << 16].double().nan_to_num()
        place = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype)
        return torch.stack((x.sum(), (x * place.sin()).sum()))


def _weights(anatomy: Anatomy) -> dict[str, Any]:
    """Return numbers of weights by group, and in what format they are."""
    total: Counter[str] = Counter()
    trainable: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    groups = _groups(anatomy)
    for name, p in unwrapped(anatomy.model).named_parameters():
        adapter = any(word in name for word in ADAPTERS)
        group = "adapters" if adapter else groups.get(id(p), "other")
        total[group] += p.numel()
        trainable[group] += p.numel() * p.requires_grad
        dtypes[str(p.dtype).removeprefix("torch.")] += p.numel()
    return {
        "class": type(unwrapped(anatomy.model)).__name__,
        "parameters": sum(total.values()),
        "trainable": sum(trainable.values()),
        "groups": {g: {"all": n, "trainable": trainable[g]} for g, n in total.items()},
        "dtypes": dict(dtypes),
        "blocks": len(anatomy.blocks),
    }


def _groups(anatomy: Anatomy) -> dict[int, str]:
    """Return id of parameter → its group; the later of two groups wins."""
    attention = [site.module for site in anatomy.attention]
    experts = [
        module for router in anatomy.routers.values() for module in router.experts
    ]
    routers = [router.module for router in anatomy.routers.values()]
    modules = [module for _, module in named(anatomy.model)]
    parts: dict[str, list[nn.Module]] = {
        "attention": attention,
        "feed-forward": [*anatomy.feedforwards.values()],
        "experts": experts,
        "routers": routers,
        "embedding": [m for m in modules if isinstance(m, nn.Embedding)],
        "norms": [
            *anatomy.norms.values(),
            *(m for m in modules if isinstance(m, NORMS)),
        ],
    }
    return {
        id(p): group
        for group, some in parts.items()
        for module in some
        for p in module.parameters()
    }
