"""Finds recurrences and short convolutions, and the parts that make their gates.

They are told by what they hold, not by their class, so that a model of one's own is
found as well: a delta rule by ``A_log`` beside maps of a and b, Mamba-2 by ``A_log``
per head beside one input map, Mamba by ``A_log`` per channel and state.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from equipoise.anatomy.sites import Mixer, MixerKind

Sources = Mapping[str, str]
"""What is read → the name of the part whose output makes it."""

PAIRS = (("in_proj_a", "in_proj_b"), ("a_proj", "b_proj"))
"""Names of the maps that make a delta rule's decay and its β."""
FIXED = ("time_decay", "slope_rate")
"""RWKV's decay of a channel, and that of lightning attention's heads."""
UNKNOWN = ("recurrent_param", "fgate_preact", "A_log", "A", "dt_proj")
"""What recurrences hold whose gates we cannot read."""


def mixers(modules: Mapping[str, nn.Module]) -> dict[str, Mixer]:
    """Return the mixers without softmax, by name; none inside another."""
    found: dict[str, Mixer] = {}
    for name, module in modules.items():
        inside = any(f"{name}.".startswith(f"{other}.") for other in found)
        made = None if inside else mixer(module)
        if made is not None:
            found[name] = made
    return found


def mixer(module: nn.Module) -> Mixer | None:
    """Return the module as a mixer, if it mixes tokens without a softmax."""
    kind, sources = _recognised(module)
    if kind is None:
        return None
    parts = module._modules
    known = {role: part for role, name in sources.items() if (part := parts[name])}
    return Mixer(module=module, kind=kind, sources=known)


class _Held(NamedTuple):
    """What a module holds itself, by name."""

    tensors: dict[str, Tensor | None]
    parts: set[str]

    def rates(self, axes: int) -> bool:
        """Whether it holds the logarithm of decay rates with this many axes."""
        rates = self.tensors.get("A_log")
        return rates is not None and rates.ndim == axes


def _log_decay(held: _Held) -> Sources | None:
    if {"forget_gate", "b_proj"} <= held.parts:
        return {"decay": "forget_gate", "write": "b_proj"}
    return None


def _delta(held: _Held) -> Sources | None:
    if not (held.rates(1) and "dt_bias" in held.tensors):
        return None
    if "in_proj_ba" in held.parts:
        return {"write and decay": "in_proj_ba"}
    pair = next((pair for pair in PAIRS if {*pair} <= held.parts), None)
    return None if pair is None else {"decay": pair[0], "write": pair[1]}


def _heads(held: _Held) -> Sources | None:
    known = held.rates(1) and "dt_bias" in held.tensors and "in_proj" in held.parts
    return {"decay": "in_proj"} if known else None


def _channels(held: _Held) -> Sources | None:
    if not (held.rates(2) and {"x_proj", "dt_proj"} <= held.parts):
        return None
    return {"decay": "dt_layernorm" if "dt_layernorm" in held.parts else "x_proj"}


def _fixed(held: _Held) -> Sources | None:
    return {} if any(held.tensors.get(name) is not None for name in FIXED) else None


def _unknown(held: _Held) -> Sources | None:
    return {} if any(n in held.tensors or n in held.parts for n in UNKNOWN) else None


KINDS: Mapping[MixerKind, Callable[[_Held], Sources | None]] = {
    "log decay": _log_decay,
    "delta": _delta,
    "heads": _heads,
    "channels": _channels,
    "fixed": _fixed,
    "unknown": _unknown,
}
"""Kind → what is read of a module that is of it; the first that fits counts."""


def _recognised(module: nn.Module) -> tuple[MixerKind | None, Sources]:
    parts = {name for name, part in module._modules.items() if part is not None}
    held = _Held({**module._parameters, **module._buffers}, parts)
    for kind, sources_of in KINDS.items():
        if (sources := sources_of(held)) is not None:
            return kind, sources
    if "time_shift" in parts:  # RWKV: each token beside the one before it
        return "convolution", {}
    if not _is_short_convolution(module):
        return None, {}
    inside = {name.rpartition(".")[2] for name, _ in module.named_parameters()}
    return ("convolution" if inside.isdisjoint(UNKNOWN) else "unknown"), {}


def _is_short_convolution(module: nn.Module) -> bool:
    """Whether it runs a filter over each channel's last tokens, and holds it itself."""
    return any(
        isinstance(part, nn.Conv1d) and part.groups == part.in_channels > 1
        for part in module._modules.values()
    )
