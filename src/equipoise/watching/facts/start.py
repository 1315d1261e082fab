"""Facts of the start: whether the weights are as initialised, and what is configured.

A norm's scale begins at exactly 1 (or 0, where 1 is added to it) and its shift at
exactly 0; no training leaves all of them there. So weights that were trained once can
be told from weights that never were, without a threshold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.anatomy.sharding import is_dtensor, local_part
from equipoise.anatomy.sites import Anatomy, named, unwrapped
from equipoise.probes.loop_events import AnyBackward, LoopEvent
from equipoise.probes.protocols import WithAnatomy
from equipoise.watching.facts.loop_record import LoopRecord
from equipoise.watching.facts.unloaded import state_under_other_names
from equipoise.watching.facts.weights import parameters_of


@dataclass(slots=True)
class StartFacts(WithAnatomy):
    """What the weights were before the first update that was seen."""

    record: LoopRecord
    name: str = "start"
    _norms: dict[str, Any] = field(default_factory=dict)
    _frozen: int | None = None
    """Weights of the blocks that were frozen in the first sample."""
    _looked: bool = False
    _unloaded: str | None = None
    """The prefix by which the names of a state in memory differ."""

    def describe(self, anatomy: Anatomy) -> None:
        """Look once, before training, for a state that was not loaded."""
        if not self._looked and _as_initialised(anatomy.model):
            self._unloaded = state_under_other_names(anatomy.model)
        self._looked = True

    def on_loop(self, event: LoopEvent) -> None:
        first = not self._norms and isinstance(event, AnyBackward)
        if first and self.record.armed and self.record.model is not None:
            updates = (kept.updates for kept in self.record.optimizers.values())
            began = max(updates, default=0) == 0
            self._norms = {"began": began, **norms_at_start(self.record.model)}

    def facts(self) -> Mapping[str, Any]:
        model = self.record.model
        if model is None:
            return {}
        blocks = self._blocks()
        now = frozen(model, blocks)
        if self._frozen is None:
            self._frozen = now["frozen"]
        now["since_start"] = min(self._frozen, now["frozen"])
        found = {**configured(model, blocks), "frozen": now}
        if self._unloaded is not None:
            found["unloaded"] = self._unloaded
        # The numbers arrive with the sample that states them first, and stay known.
        return {**found, "norms": self._norms} if self._norms else found

    def _blocks(self) -> tuple[str, ...]:
        anatomy = self.record.anatomy
        return () if anatomy is None else tuple(anatomy.blocks)


def _as_initialised(model: nn.Module) -> bool:
    """Return whether all norms are as no training leaves them; waits for the device."""
    norms = norms_at_start(model)
    if not norms["count"] or any(p.is_meta for p in model.parameters()):
        return False
    shifted = norms.get("shifted")
    untouched = int(norms["untouched"]) == norms["count"]
    return untouched and not (shifted is not None and int(shifted))


def norms_at_start(model: nn.Module) -> dict[str, Any]:
    """Return how many norms there are, and how many are as no training leaves them."""
    scales = [local_part(w.detach()) for w, _ in _norms(model)]
    shifts = [local_part(b.detach()) for _, b in _norms(model) if b is not None]
    if not scales:
        return {"count": 0}
    untouched = torch.stack([((w == 1).all() | (w == 0).all()) for w in scales])
    found: dict[str, Any] = {"count": len(scales), "untouched": untouched.sum()}
    if shifts:
        found["shifted"] = torch.stack([b.any() for b in shifts]).sum()
    return found


def _norms(model: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield scale and shift of each norm that has a scale."""
    for _, module in named(model):
        if "norm" not in type(module).__name__.lower():
            continue
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 1 and local_part(weight).numel():
            yield weight, module._parameters.get("bias")


def configured(model: nn.Module, blocks: tuple[str, ...]) -> dict[str, Any]:
    """Return the promises of a configuration, and the weights that are there."""
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    found: dict[str, Any] = {"model": type(inner).__name__}
    if name := getattr(config, "_name_or_path", ""):
        found["pretrained"] = str(name)
    if isinstance(promised := getattr(config, "tie_word_embeddings", None), bool):
        found["tie"] = {"promised": promised, **_tie(inner, blocks)}
    if isinstance(size := getattr(config, "vocab_size", None), int):
        rows = [
            m.num_embeddings for m in inner.modules() if isinstance(m, nn.Embedding)
        ]
        found["vocabulary"] = {"configured": size, "rows": max(rows, default=0)}
    return found


def _tie(model: nn.Module, blocks: tuple[str, ...]) -> dict[str, Any]:
    """Return whether the one embedding and the one output map of its shape are tied.

    Where adapters keep copies of their own, where weights are sharded, or where there
    are several of either, it cannot be said.
    """
    if any(type(m).__name__ == "ModulesToSaveWrapper" for m in model.modules()):
        return {}
    both = _ends_by_method(model) or _ends_by_shape(model, blocks)
    if both is None or any(map(is_dtensor, both)):
        return {}
    into, out = both
    if into.shape != out.shape:
        return {}
    shared = into is out or into.data_ptr() == out.data_ptr()
    names = {id(p): name for name, p in parameters_of(model)}
    return {"shared": shared, "head": names.get(id(out), "")}


def _ends_by_method(model: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return both weights of a class of transformers that says it ties them."""
    if not getattr(model, "_tied_weights_keys", None):
        return None
    ends: Any = model
    into = getattr(ends.get_input_embeddings(), "weight", None)
    out = getattr(ends.get_output_embeddings(), "weight", None)
    return (into, out) if into is not None and out is not None else None


def _ends_by_shape(
    model: nn.Module, blocks: tuple[str, ...]
) -> tuple[Tensor, Tensor] | None:
    """Return both weights of a plain model, if outside its blocks one pair fits."""
    if hasattr(model, "get_input_embeddings"):
        return None
    inside = tuple(f"{block}." for block in blocks)
    outer = [m for name, m in named(model) if not name.startswith(inside)]
    tables = [m.weight for m in outer if isinstance(m, nn.Embedding)]
    maps = [m.weight for m in outer if isinstance(m, nn.Linear)]
    pairs = [(a, b) for a in tables for b in maps if a.shape == b.shape]
    return pairs[0] if len(pairs) == 1 else None


def frozen(model: nn.Module, blocks: tuple[str, ...]) -> dict[str, Any]:
    """Return how much of the blocks' matrices is not trained."""
    inside, still, names = 0, 0, list[str]()
    for name, parameter in parameters_of(model):
        if parameter.ndim < 2 or not any(name.startswith(f"{b}.") for b in blocks):
            continue
        inside += parameter.numel()
        if not parameter.requires_grad:
            still += parameter.numel()
            names.append(name)
    return {"matrices": inside, "frozen": still, "names": names[:4]}
