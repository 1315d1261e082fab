"""Mixers without softmax: how fast they forget, and how much they write.

A recurrent mixer carries a state from token to token, S ← α·S + β·(…). The decay α of
a token and a head is made of a projection's output as the model makes it:

======================  =============================================================
gated delta rule        α = exp(−exp(A)·softplus(a + bias)),  β = σ(b)
log decay (KDA)         α = exp(g), g as its module returns it,  β = σ(b)
Mamba-2, per head       Δ = softplus(dt + bias) in its limits,  α = exp(−exp(A)·Δ)
Mamba, per channel      Δ = softplus(W·step + bias),  α = exp(−exp(A)·Δ), per state too
RWKV, lightning         α = exp(−exp(decay)), exp(−slope): the same for every token
======================  =============================================================

Two ends are told apart by what a format and a sequence allow, not by a threshold: a
token *forgets* where α < 2⁻⁸, so that in bfloat16 nothing of the state before is left
beside what is written; its trace *lasts* where more than half of it would be left after
as many tokens as the sequence has.

Axes, in this file:  T token · H head · D channel · N state.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.sharding import is_dtensor
from equipoise.anatomy.sites import Anatomy, Mixer, Reason
from equipoise.probes.protocols import Emit, Guarded

HIDDEN = ("mixer.*",)
NOT_CALLED = Reason("mixer_unseen", hides=HIDDEN)
SHARDED = Reason("mixer_sharded", hides=HIDDEN)
LN_LEAST = -8 * math.log(2)
"""ln 2⁻⁸: what bfloat16 loses beside a number of full size."""
LEAST = 2.0**-8
LN_HALF = math.log(0.5)
TOKENS = 64
"""Tokens of which channels and states are looked at: there are thousands of both."""


@dataclass(frozen=True, slots=True)
class MixerGates:
    """Emit how mixers without softmax forget and write, per head if they have any."""

    name: str = "mixers"

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        for site, mixer in anatomy.mixers.items():
            if mixer.kind in ("convolution", "unknown"):
                continue  # no gate that forgets; none that is known
            gates = _Gates(site, mixer, emit)
            for role, part in mixer.sources.items():
                yield hooks.after(part, guarded(partial(gates.on_part, role)))
            yield hooks.after(mixer.module, guarded(gates.on_end))


@dataclass(slots=True)
class _Gates:
    """One mixer in one forward pass."""

    site: str
    mixer: Mixer
    emit: Emit
    seen: set[str] = field(default_factory=set)

    def on_part(self, role: str, part: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or output.ndim < 2:
            return
        self.seen.add(role)
        if any(is_dtensor(x) for x in (output, *self.mixer.module.parameters(False))):
            self.emit.not_read(self.site, SHARDED)
            return
        given = output.detach()
        if role == "write and decay":
            b, a = written_and_decay(self.mixer.module, given)
            self._writes(b)
            self._forgets("delta", a)
        elif role == "write":
            self._writes(given)
        else:
            self._forgets(self.mixer.kind, given)

    def on_end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Emit what no token changes, and name what was not seen."""
        if self.seen != set(self.mixer.sources):
            self.emit.not_read(self.site, NOT_CALLED)
        elif self.mixer.kind == "fixed" and (length := _length(args, output)):
            self._emit_decay(fixed_ln_decay(module), length)
        self.seen.clear()

    def _writes(self, b: Tensor) -> None:
        beta_TH = b.flatten(0, -2).float().sigmoid()
        doubled = bool(getattr(self.mixer.module, "allow_neg_eigval", False))
        self.emit(self.site, "mixer.write", (1 + doubled) * beta_TH.mean(0), how="mean")
        self.emit(
            self.site, "mixer.closed", share(beta_TH < LEAST, beta_TH), how="mean"
        )

    def _forgets(self, kind: str, given: Tensor) -> None:
        module: Any = self.mixer.module
        length = given.shape[1] if given.ndim > 2 else 1
        if kind == "log decay":
            self._emit_decay(given.float().flatten(0, 1), length)
            return
        step = STEPS[kind](module, given)
        if kind != "delta":
            over = tuple(range(step.ndim - (kind == "heads")))
            self.emit(self.site, "mixer.step", step.mean(over).view(-1), how="mean")
        rate = module.A_log.detach().float()
        self.emit(self.site, "mixer.log_rate", rate.abs().amax().view(1))
        if kind == "channels":
            self._emit_decay(
                (-rate.exp() * step[:, :, None]).flatten(1)[:, None], length
            )
        else:
            self._emit_decay((-rate.exp() * step)[..., None], length)

    def _emit_decay(self, ln_decay_THX: Tensor, length: int) -> None:
        """Emit the shares of both ends; the last axis is what one head has many of."""
        x = ln_decay_THX
        forgets_H = share(x < LN_LEAST, x)
        lasts_H = share(x * length > LN_HALF, x)
        self.emit(self.site, "mixer.forgets", forgets_H, how="mean")
        self.emit(self.site, "mixer.lasts", lasts_H, how="mean")


def share(true: Tensor, of: Tensor) -> Tensor:
    """Return the share per head that is true; NaN where a number is none.

    >>> x = torch.tensor([[0.1, 2.0], [0.2, torch.nan]])
    >>> share(x < 1, x)
    tensor([1., nan])
    """
    over = (0, *range(2, true.ndim))
    return torch.where(of.isnan().any(over), torch.nan, true.float().mean(over))


def written_and_decay(module: Any, ba: Tensor) -> tuple[Tensor, Tensor]:
    """Take b and a apart, which one map makes: group by group, first b, then a."""
    heads = int(module.A_log.numel())
    groups = int(getattr(module, "num_k_heads", heads))
    by_group = ba.unflatten(-1, (groups, 2, heads // groups))
    return by_group[..., 0, :].flatten(-2), by_group[..., 1, :].flatten(-2)


def fixed_ln_decay(module: Any) -> Tensor:
    """Return the logarithm of a decay that no token changes: per head, or of channels
    that are no heads."""
    slope = {**module._buffers, **module._parameters}.get("slope_rate")
    if isinstance(slope, Tensor):
        return -slope.detach().float().flatten()[None, :, None]
    decay: Tensor = module.time_decay
    return -decay.detach().float().flatten().exp()[None, None]


def _delta_step(module: Any, a: Tensor) -> Tensor:
    return F.softplus(a.flatten(0, -2).float() + module.dt_bias.detach().float())


def _head_step(module: Any, projected: Tensor) -> Tensor:
    """Δ of Mamba-2: the last columns of its input map, in the limits it sets."""
    heads = module.A_log.numel()
    dt = projected[..., -heads:].flatten(0, -2).float()
    scale = module._buffers.get("mup_vector")
    if scale is not None:
        dt = dt * scale.flatten()[-heads:]
    step = F.softplus(dt + module.dt_bias.detach().float())
    low, high = getattr(module, "time_step_limit", (0.0, math.inf))
    return step.clamp(low, high)


def _channel_step(module: Any, made: Tensor) -> Tensor:
    """Δ of Mamba, of a few tokens: its map's weights are used, not its module."""
    dt = module.dt_proj
    rows = made.flatten(0, -2)
    every = max(1, len(rows) // TOKENS)
    few = rows[::every, : dt.weight.shape[1]].float()
    bias = 0.0 if dt.bias is None else dt.bias.detach().float()
    return F.softplus(few @ dt.weight.detach().float().mT + bias)


STEPS = {"delta": _delta_step, "heads": _head_step, "channels": _channel_step}


def _length(args: Any, output: Any) -> int:
    """Return how long the sequences are that a mixer was called with."""
    given = output[0] if isinstance(output, tuple) else output
    tensors = (x for x in (given, *args) if isinstance(x, Tensor) and x.ndim > 2)
    return next((x.shape[1] for x in tensors), 0)
