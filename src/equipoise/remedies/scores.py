"""Remedies of attention scores: QK-norm, temperature per head, soft-cap.

Axes, in this file:  x any · H head · D head channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.anatomy.sites import AttentionSite
from equipoise.errors import InputError
from equipoise.remedies.attention_hooks import (
    Letter,
    add_edit,
    attention_sites,
    edit_heads,
    projections_of,
    refuse_hidden_scores,
    refuse_own_norm,
)
from equipoise.remedies.base import Changes, Positive, RecordedRemedy, Undo, over_ranks


@dataclass(slots=True)
class ScoreNorm:
    """x·rms(x)^(-s)·(1 + s(g - 1)), with s from 0 to 1 over the first steps.

    At s = 0 nothing changes; at s = 1 it is an RMS norm with gains g. The gains start
    at what each head's RMS is in the first training pass, so logits keep their size.
    """

    gains: dict[Letter, nn.Parameter]
    progress: dict[str, Any]
    steps: int
    known: set[Letter] = field(default_factory=set)

    def __call__(self, letter: Letter, x_xHD: Tensor) -> Tensor:
        share = min(1.0, self.progress["step"] / self.steps)
        mean_xH1 = x_xHD.float().square().mean(-1, keepdim=True)
        if not share and letter not in self.known and torch.is_grad_enabled():
            self._start(letter, mean_xH1.detach())
        if not share:
            return x_xHD
        gain_HD = 1 + share * (self.gains[letter] - 1)
        scale_xHD = (mean_xH1 + 1e-6) ** (-share / 2) * gain_HD
        scaled: Tensor = x_xHD * scale_xHD.to(x_xHD.dtype)
        return scaled

    def _start(self, letter: Letter, mean_xH1: Tensor) -> None:
        rms_H1 = over_ranks(mean_xH1.flatten(0, -3).mean(0)).sqrt()
        with torch.no_grad():
            self.gains[letter].copy_(rms_H1.expand_as(self.gains[letter]))
        self.known.add(letter)


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm(RecordedRemedy):
    """Normalise queries and keys of every head (Henry et al., Dehghani et al.).

    The norm comes in over ``steps`` steps, so that the model is the same when it is
    switched on. Gains are learned; they join the optimiser.
    """

    steps: int = 20
    only: Sequence[str] = ()
    """Names of attention modules; all of them by default."""
    name: ClassVar[str] = "qk_norm"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"qk_norm comes in over at least 1 step, not {self.steps}")

    def change(self, changes: Changes) -> Undo:
        changes.count_steps()
        sites = attention_sites(changes.model, self.only)
        for site in sites:
            self._install(changes, site)
        return changes.applied(sites=len(sites), steps=self.steps)

    def _install(self, changes: Changes, site: AttentionSite) -> None:
        refuse_own_norm(self.name, site)
        maps = projections_of(site)
        gains: dict[Letter, nn.Parameter] = {}
        counts: dict[Letter, int] = {"q": maps.heads, "k": maps.kv_heads}
        width = maps.q.matrix().shape[0] // maps.heads
        for letter, heads in counts.items():
            like = getattr(getattr(maps, letter).module, maps.q.attribute)
            gain_HD = torch.ones(heads, width, device=like.device, dtype=torch.float32)
            gains[letter] = nn.Parameter(gain_HD)
            changes.parameter(site.module, f"qk_norm_{letter}", gains[letter])
        edit_heads(changes, site, ScoreNorm(gains, changes.progress, self.steps))


@dataclass(slots=True)
class QueryScale:
    """Divides the queries of each head by its temperature."""

    tau_H: Tensor
    """One number for all heads, or one each."""

    def __call__(self, letter: Letter, x_xHD: Tensor) -> Tensor:
        if letter == "k":
            return x_xHD
        return x_xHD / self.tau_H[:, None].to(x_xHD)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTemperature(RecordedRemedy):
    """Divide the scores of chosen heads by τ: site → one τ per head."""

    tau: dict[str, Sequence[float]] | float = 2.0
    """One number is for every head of every site."""
    name: ClassVar[str] = "head_temperature"
    preserves_function: ClassVar[bool] = False

    def change(self, changes: Changes) -> Undo:
        chosen = tuple(self.tau) if isinstance(self.tau, dict) else ()
        sites = attention_sites(changes.model, chosen)
        for site in sites:
            refuse_own_norm(self.name, site)
            edit_heads(changes, site, QueryScale(self._of(site)))
        return changes.applied(sites=len(sites))

    def _of(self, site: AttentionSite) -> Tensor:
        heads = projections_of(site).heads
        tau = self.tau[site.name] if isinstance(self.tau, dict) else [self.tau] * heads
        if len(tau) != heads or not all(t > 0 for t in tau):
            raise InputError(
                f"{site.name} has {heads} heads: give that many positive temperatures, "
                f"not {list(tau)}"
            )
        return torch.tensor(tau)


@dataclass(slots=True)
class Capped:
    """cap·tanh(z/cap)."""

    cap: float

    def __call__(self, z: Tensor) -> Tensor:
        return self.cap * torch.tanh(z / self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCap(RecordedRemedy):
    """Cap attention logits smoothly: z → cap·tanh(z/cap), as Gemma 2 does.

    Small logits are as before; fused attention is written out and holds its scores.
    """

    cap: Positive = 30.0
    only: Sequence[str] = ()
    name: ClassVar[str] = "soft_cap"
    preserves_function: ClassVar[bool] = False

    def change(self, changes: Changes) -> Undo:
        refuse_hidden_scores(changes.model)
        sites = attention_sites(changes.model, self.only)
        for site in sites:
            add_edit(changes, site, "scores", Capped(self.cap))
        return changes.applied(sites=len(sites), cap=self.cap)
