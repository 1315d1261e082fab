"""A checkpoint as it is handled here: names, shapes, and one tensor at a time."""

import copy
import math
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.anatomy.head_counts import HEAD_COUNTS, count
from equipoise.errors import InputError

FORMS = (
    "a .safetensors file, its .index.json, a torch file (.pt, .pth, .bin), a .gguf "
    "file, a Hugging Face model directory, or a run of the lab or its checkpoint"
)
MOST_TENSORS = 200_000
"""Larger than any model we know of: DeepSeek-V3 has 91,991 in 163 shards."""
LARGEST_HEADER = 24 << 20
"""Bytes of JSON; parsed, it takes ten times as much memory."""
CHUNK = 1 << 24
"""Entries looked at together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a checkpoint, not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for one that torch has no name for."""
    file: Path | None = None
    start: int = 0
    """Where its bytes begin in the file."""

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def is_float(self) -> bool:
        return self.dtype is not None and self.dtype.is_floating_point


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The tensors of a model by name, and what its folder says about it."""

    name: str
    format: str
    entries: dict[str, Entry]
    load: Callable[[str, int, int], Tensor]
    """Name, first entry, number of entries → those entries, flat."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Of the model: ``config.json``, GGUF's metadata, the lab's task."""
    heads: Mapping[str, int] = field(default_factory=dict)
    """Module → query heads, where a model in memory says so itself."""
    epsilons: Mapping[str, float] = field(default_factory=dict)
    """Norm → ε, likewise."""
    packs: int = 0
    """Weights that are read from codes and scales as the numbers they stand for."""
    offsets: Mapping[str, float] = field(default_factory=dict)
    """Norm → the number added to its stored γ; NaN where that is neither 0 nor 1."""

    def read(self, name: str) -> Tensor:
        """Return one tensor as stored."""
        entry = self.entries[name]
        return self.load(name, 0, entry.numel).view(entry.shape)

    def chunks(self, name: str, *, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield a tensor's entries in order, so many at a time."""
        total = self.entries[name].numel
        for start in range(0, total, size):
            yield self.load(name, start, min(size, total - start))


def in_memory(model: nn.Module | Mapping[str, Tensor], *, name: str) -> Checkpoint:
    """Return a model's or a state dict's tensors, not copied."""
    state = model.state_dict() if isinstance(model, nn.Module) else model
    tensors = {k: t.detach() for k, t in state.items() if isinstance(t, Tensor)}
    if not tensors:
        raise InputError(f"{name} holds no tensor: give a state dict, name → tensor")
    entries = {
        k: Entry(shape=tuple(t.shape), dtype=t.dtype) for k, t in tensors.items()
    }

    def load(key: str, start: int, count: int) -> Tensor:
        return tensors[key].reshape(-1)[start : start + count]

    config = getattr(model, "config", None)
    listed = getattr(config, "to_dict", None)
    plain = listed() if listed is not None else _fields(config)
    parts = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    return Checkpoint(
        name=name,
        format="in memory",
        entries=entries,
        load=load,
        config=plain,
        heads={n: h for n, m in parts.items() if (h := count(m, HEAD_COUNTS))},
        epsilons={n: e for n, m in parts.items() if (e := _epsilon(m))},
        offsets={n: _offset(m) for n, m in parts.items() if _is_norm(m)},
    )


def _epsilon(module: nn.Module) -> float | None:
    found = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    return found if isinstance(found, float) else None


def _is_norm(module: nn.Module) -> bool:
    """Say whether a module is a norm with γ, and perhaps β, and nothing else."""
    own = dict(module.named_parameters())
    weight = own.get("weight")
    return (
        "norm" in type(module).__name__.lower()
        and own.keys() <= {"weight", "bias"}
        and not any(True for _ in module.buffers())
        and weight is not None
        and weight.dim() == 1
        and weight.numel() > 1
        and not weight.is_meta
    )


@torch.no_grad()
def _offset(norm: nn.Module) -> float:
    """Return the number a norm adds to its stored γ, by running a copy on one token.

    The token has mean 0 and rms 1, so LayerNorm and RMSNorm both leave γ·x + β.
    """
    copied = copy.deepcopy(norm).float()
    weight, bias = copied.weight, getattr(copied, "bias", None)
    assert isinstance(weight, Tensor)
    pairs = weight.numel() // 2
    x = weight.new_ones(weight.numel())
    x[1 : 2 * pairs : 2] = -1
    x[2 * pairs :] = 0
    x *= math.sqrt(weight.numel() / (2 * pairs))
    try:
        y = copied.forward(x[None])[0]
    except (TypeError, ValueError, RuntimeError, IndexError):
        return math.nan
    gain = ((y - bias if isinstance(bias, Tensor) else y) / x)[: 2 * pairs]
    for offset in (0.0, 1.0):
        declared = (weight + offset)[: 2 * pairs]
        if torch.allclose(gain, declared, rtol=1e-3, atol=1e-5):
            return offset
    return math.nan


def _fields(config: Any) -> dict[str, Any]:
    found = getattr(config, "__dict__", None) or {}
    if not found and hasattr(config, "__dataclass_fields__"):
        found = {k: getattr(config, k) for k in config.__dataclass_fields__}
    return dict(found)


def regular(path: Path) -> None:
    """Refuse what is no file: opening a pipe would wait for ever."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no such checkpoint; give {FORMS}") from error
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is no regular file; give {FORMS}")


def check_count(count: int, path: Path) -> None:
    if count > MOST_TENSORS:
        raise InputError(f"{path} lists {count} tensors; {MOST_TENSORS} are the most")


def printable(name: str) -> str:
    """Return a tensor's name fit for a terminal, shortened."""
    plain = "".join(c if c.isprintable() else "�" for c in name)
    return plain if len(plain) <= 120 else f"{plain[:117]}…"
