"""Does moving ε help? One model trained once per policy: same start, same data.

Beside the loss, an fp16 shadow of the model is run at every step, as BGSS's authors do:
its mismatch, its spikes, and, at every step where a policy acts, its mismatch on the
very same batch before and after.
"""

import math
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.auditing.precision.emulation import relative_error
from equipoise.auditing.subject import batch_as, output_of, widened
from equipoise.numerics.formats import FORMATS
from equipoise.remedies.epsilon import (
    Bgss,
    Epsilon,
    NormState,
    epsilons,
    noise_rule,
    published_rule,
)
from equipoise.theory.baek_v2 import bgss_scores
from equipoise_lab.studies.fragility.measurement import FragilityModel
from equipoise_lab.studies.fragility.published import PublishedBlocks, published_blocks

HALF = FORMATS["fp16"]
EVERY = 5
"""Steps between two looks of the published rule, and of ours."""
SHADOWED = 4
"""Sequences of a batch that the fp16 shadow sees."""

Policy = Callable[[nn.Module, Tensor, int], dict[str, float]]
"""Model, batch and step → norms to change and their new ε."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controlled:
    """One run under one policy."""

    policy: str
    seed: int
    actions: int
    """ε changed at one norm at one step."""
    layer_steps: int
    """Σ over steps of the norms whose ε is not what it was at the start."""
    tail_loss: float
    """Mean over the last quarter."""
    final_mismatch: float
    worst_mismatch: float
    """After the 24 steps of history that the paper's event needs."""
    onsets: int
    replayed: float
    """Mean of (after - before)/before over decisions, same batch; NaN without any."""


def controlled(
    subject: FragilityModel, name: str, policy: Policy, *, seed: int, steps: int
) -> Controlled:
    """Train once under a policy and return what came of it."""
    torch.manual_seed(seed)
    model, batches = subject.built(), subject.batches(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    start = epsilons(model)
    losses, mismatches, replays, moved, protected = [], [], list[float](), 0, 0
    for step in range(steps):
        x, y = batches.take()
        before = mismatch(model, x[:SHADOWED])
        changed = policy(model, x, step)
        if changed:
            Epsilon(values=changed).apply(model)
            replays.append(mismatch(model, x[:SHADOWED]) / before - 1)
            before *= 1 + replays[-1]
        moved += len(changed)
        protected += sum(e != start[n] for n, e in epsilons(model).items())
        mismatches.append(before)
        loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    tail = steps // 4
    return Controlled(
        policy=name,
        seed=seed,
        actions=moved,
        layer_steps=protected,
        tail_loss=statistics.fmean(losses[-tail:]),
        final_mismatch=statistics.fmean(mismatches[-tail:]),
        worst_mismatch=max(mismatches[24:], default=math.nan),
        onsets=len(onsets(mismatches)),
        replayed=statistics.fmean(replays) if replays else math.nan,
    )


@torch.no_grad()
def mismatch(model: nn.Module, x: Tensor) -> float:
    """Return the error of the model cast to fp16 as a whole, against itself."""
    shadow = widened(model, torch.float16)
    return relative_error(output_of(shadow, batch_as(x, torch.float16)), model(x))


def onsets(mismatches: list[float]) -> list[int]:
    """Return v2's events: 1.22 × the median of the last 12, 16 steps after the last.

    >>> onsets([1.0] * 30 + [2.0, 2.0] + [1.0] * 20 + [2.0])
    [30, 52]
    """
    found: list[int] = []
    for step in range(24, len(mismatches)):
        usual = statistics.median(mismatches[step - 12 : step])
        rested = not found or step - found[-1] >= 16
        if rested and mismatches[step] > 1.22 * usual:
            found.append(step)
    return found


def norm_states(model: nn.Module, x: Tensor) -> dict[str, NormState]:
    """Return what enters each norm, as the rules want it."""
    found: dict[str, NormState] = {}
    with ExitStack() as exits, torch.no_grad():
        for name, eps in epsilons(model).items():
            norm = model.get_submodule(name)
            hook = norm.register_forward_pre_hook(_noting(found, name, eps))
            exits.callback(hook.remove)
        output_of(model, x)
    return found


def _noting(
    found: dict[str, NormState], name: str, eps: float
) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        given = args[0].detach()
        found[name] = NormState(
            variance=float(given.var(-1, correction=0).median()),
            power=float(given.square().mean()),
            width=given.shape[-1],
            eps=eps,
        )

    return note


def nothing(model: nn.Module, x: Tensor, step: int) -> dict[str, float]:
    """Leave ε alone."""
    return {}


def static(model: nn.Module, x: Tensor, step: int) -> dict[str, float]:
    """Set 1e-3 everywhere before the first step."""
    return {} if step else dict.fromkeys(epsilons(model), 1e-3)


def by_rule(rule: Callable[..., float]) -> Policy:
    """Return a policy that asks a rule about every norm, every five steps."""

    def act(model: nn.Module, x: Tensor, step: int) -> dict[str, float]:
        if step % EVERY:
            return {}
        seen = norm_states(model, x[:16])
        new = {name: rule(state, HALF) for name, state in seen.items()}
        return {name: eps for name, eps in new.items() if eps > seen[name].eps}

    return act


Ranking = Callable[[PublishedBlocks], list[float]]


def by_bgss(subject: FragilityModel, ranking: Ranking) -> Policy:
    """Return BGSS with its warm-up, trigger and budget, and a ranking of layers."""
    controllers: list[Bgss] = []

    def act(model: nn.Module, x: Tensor, step: int) -> dict[str, float]:
        paper = published_blocks(model, x, risks_only=True)
        if not controllers:
            controllers.append(Bgss(layers=len(paper.v2)))
        moved = controllers[0].step(
            step, total_risk=paper.v2_prediction(HALF), scores=ranking(paper)
        )
        return {name: e for i, e in moved.items() for name in paper.parts[i].norms}

    return act


def full_score(paper: PublishedBlocks) -> list[float]:
    """Rank by u·risk·(1 + LN dominance)·(1 + ρ_LN), as released."""
    return bgss_scores(paper.v2, final_norm=paper.final_norm, format=HALF)


def risk_only(paper: PublishedBlocks) -> list[float]:
    """Rank by u·risk: the abstract's control, absent from the released code."""
    return [HALF.unit_roundoff * risk for risk in paper.v2_risks]


def at_random(seed: int) -> Ranking:
    """Rank by chance, from the generator the released control uses: seed + 1009."""
    rng = torch.Generator().manual_seed(seed + 1009)
    return lambda paper: torch.rand(len(paper.v2), generator=rng).tolist()


def policies(subject: FragilityModel, seed: int) -> dict[str, Policy]:
    """Return every policy under comparison; doing nothing comes first."""
    return {
        "nothing": nothing,
        "published rule": by_rule(published_rule),
        "noise rule": by_rule(noise_rule),
        "static 1e-3": static,
        "BGSS": by_bgss(subject, full_score),
        "risk only, same budget": by_bgss(subject, risk_only),
        "random, same budget": by_bgss(subject, at_random(seed)),
    }
