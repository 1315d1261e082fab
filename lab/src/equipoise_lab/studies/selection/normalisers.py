"""Normalisers in place of softmax: which still selects when the context grows?

Each is trained from scratch. The same targets are scored with 1, 2 and 4 times the
training length in front of them, so only the context differs; positions must not end
with training: rope or none.

Axes, in this file:  B batch · H head · Q query · K key · D head channel · T token.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.errors import InputError
from equipoise.numerics.normalisers import rows
from equipoise.numerics.selection import HeadMetricOptions, selection_of_heads
from equipoise_lab.data import DataOptions, open_data
from equipoise_lab.models import GPT, GPTConfig, SelfAttention
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.figures import Figure, FigureLine, chart
from equipoise_lab.results.finding import StudyFinding, StudyGrid, against
from equipoise_lab.results.statistics import (
    PairedDifference,
    corrected,
    seeds_to_decide,
    summary,
)
from equipoise_lab.running.execution import NORMALISER_ARMS, TrainedModel, normaliser_of
from equipoise_lab.running.experiment import FIVE_SEEDS, Arm, Experiment
from equipoise_lab.training.options import TrainOptions

MULTIPLES = (1, 2, 4)
SEQUENCES = 48
"""Scored for the loss."""
READ = 4
"""Sequences whose rows are read."""
TOP = 8
"""Size of the selection whose separability is read."""
WANTED = HeadMetricOptions(tops=(TOP,), random=4)
THETA_QUERIES = 4


def measure(trained: TrainedModel) -> dict[str, float]:
    """Return each measure at 1×, 2× and 4× the training length, as ``loss_4x``."""
    model = trained.model
    if not isinstance(model, GPT) or model.config.positions not in {"rope", "none"}:
        raise InputError("contexts grow only where positions do not end: rope or none")
    L = model.config.context
    x_BT, y_BT = held_out(L * max(MULTIPLES))
    found: dict[str, float] = {}
    for times in MULTIPLES:
        longer = with_context(model, L * times)
        read = at_length(longer, x_BT[:, -L * times :], y_BT[:, -(L // 2) :])
        found |= {f"{name}_{times}x": value for name, value in read.items()}
    return found


def held_out(length: int) -> tuple[Tensor, Tensor]:
    """Return the same unseen sequences for every run."""
    data = open_data(DataOptions(), batch=SEQUENCES, seed=0, context=length)
    assert data.validation is not None
    x_BT, y_BT = data.validation.take()
    return x_BT, y_BT


def with_context(model: GPT, length: int) -> GPT:
    """Return the model with room for longer sequences, sharing its weights."""
    longer = copy.copy(model)
    longer.config = replace(model.config, context=length)
    return longer


@torch.no_grad()
def at_length(model: GPT, x_BT: Tensor, y_BT: Tensor) -> dict[str, float]:
    """Return the loss on the last targets, and how the last queries attend."""
    model.eval()
    logits = torch.cat([model(x)[:, -y_BT.shape[1] :] for x in x_BT.split(8)])
    loss = F.cross_entropy(logits.flatten(0, 1), y_BT.flatten()).item()
    layers = attended(model, x_BT[:READ], queries=y_BT.shape[1])
    model.train()
    names = layers[0]
    return {"loss": loss} | {
        name: math.fsum(layer[name] for layer in layers) / len(layers) for name in names
    }


def attended(model: nn.Module, x_BT: Tensor, *, queries: int) -> list[dict[str, float]]:
    """Return per attention layer the means over its last queries."""
    found: list[dict[str, float]] = []
    handles = [
        module.register_forward_pre_hook(
            lambda module, args: found.append(layer(module, args[0], queries=queries))
        )
        for module in model.modules()
        if isinstance(module, SelfAttention)
    ]
    try:
        model(x_BT)
    finally:
        for handle in handles:
            handle.remove()
    return found


def layer(module: SelfAttention, x_BTC: Tensor, *, queries: int) -> dict[str, float]:
    """Return what one layer's last queries do with what they see."""
    q_BHTD, k_BGTD, v_BGTD = module.projected(x_BTC)
    q_BHQD, rule = q_BHTD[:, :, -queries:], normaliser_of(module)
    read = selection_of_heads(
        q_BHQD,
        k_BGTD,
        v_BGTD,
        wanted=WANTED,
        causal=module.causal,
        scale=module.scale,
        normaliser=rule,
    )
    z_BHQK = _scores(q_BHQD[:, :, -THETA_QUERIES:], k_BGTD, module)
    given = rows(z_BHQK)
    w_BHQK, theta = rule.weights(given), rule.theta(given)
    size_BHQ1 = w_BHQK.abs().sum(-1, keepdim=True)
    share_BHQK = w_BHQK.abs() / size_BHQ1.clamp_min(1e-30)
    entropy = torch.special.entr(share_BHQK).sum(-1)
    heads: Mapping[str, Tensor] = read.per_head()
    return {
        "theta": (theta.lower.mean() + theta.upper.mean()).item() / 2,
        "theta_width": (theta.upper - theta.lower).mean().item(),
        "total": w_BHQK.sum(-1).mean().item(),
        "peak": share_BHQK.amax(-1).mean().item(),
        "keys": entropy.exp().mean().item(),
        "zeros": (share_BHQK[given.seen_xK] == 0).double().mean().item(),
        "rho": heads["rho"].mean().item(),
        **{name: heads[key].mean().item() for name, key in _NAMES.items()},
    }


_NAMES = {
    "recall": "euclidean.recall",
    "recall_random": "random_euclidean.recall",
    "cosine": "cosine.recall",
    "cosine_random": "random_cosine.recall",
    "distance": "distance.per_token",
}


def _scores(q_BHQD: Tensor, k_BGKD: Tensor, module: SelfAttention) -> Tensor:
    """Return scores of the last queries; hidden keys at -inf."""
    H, G, Q, K = q_BHQD.shape[1], k_BGKD.shape[1], q_BHQD.shape[2], k_BGKD.shape[2]
    z_BHQK = q_BHQD @ k_BGKD.repeat_interleave(H // G, 1).mT * module.scale
    after_QK = torch.ones(Q, K, dtype=torch.bool).triu(K - Q + 1)
    return z_BHQK.masked_fill(after_QK, -math.inf) if module.causal else z_BHQK


SHAPE = GPTConfig(width=64, depth=2, heads=4, context=64, positions="rope")
QUICK = ("softmax", "ssmax", "entmax15", "sink-learnt")
# Left out for its cost, one arm more; its fixed form stands in. Not a finding.
LEFT_OUT = {"adaptive-temperature-learnt"}


def recipe(quick: bool) -> Experiment:
    """Which normaliser still selects when the context is longer than in training?"""
    names = QUICK if quick else tuple(n for n in NORMALISER_ARMS if n not in LEFT_OUT)
    train = TrainOptions(steps=60 if quick else 240, lr=3e-3, warmup=24, watch=False)
    return Experiment(
        name="selection",
        question="Which normaliser still selects when the context grows?",
        arms=tuple(
            Arm(
                name=name,
                model=SHAPE,
                train=train,
                normaliser=name,
                judges=("selection", "kept"),
            )
            for name in names
        ),
        seeds=(42, 123) if quick else FIVE_SEEDS,
        measures=(
            *(f"loss_{m}x" for m in MULTIPLES),
            "loss",
            "spikes",
            *(
                f"{name}_{m}x"
                for name in (
                    *("theta", "theta_width", "total", "peak", "keys", "zeros", "rho"),
                    *("recall", "recall_random", "cosine", "cosine_random", "distance"),
                )
                for m in MULTIPLES
            ),
        ),
    )


TIMES = (1, 2, 4)
BASE = "softmax"


def finding(evidence: Evidence) -> StudyFinding:
    """Say who loses, who keeps selecting, and what sensitivity that costs."""
    if BASE not in evidence.runs:
        return StudyFinding(verdict="softmax is not finished yet.", grids=[])
    return StudyFinding(
        verdict=" ".join(_sentences(evidence)),
        grids=[
            _losses(evidence),
            *(_changes(evidence, title, names) for title, names in CHANGES.items()),
        ],
        figures=_figures(evidence),
    )


def difference(evidence: Evidence, arm: str, measure: str) -> PairedDifference | None:
    """Return arm minus softmax over the seeds both finished; None for softmax."""
    return against(evidence, (arm, BASE), measure)


def apart(evidence: Evidence, measure: str, *, sign: int) -> list[str]:
    """Return the arms whose own interval lies on one side of softmax: exploratory."""
    pairs = compared(evidence, measure)
    return [
        arm
        for arm, pair in pairs.items()
        if pair is not None and (pair.low > 0 if sign > 0 else pair.high < 0)
    ]


def told_apart(evidence: Evidence, measure: str, *, sign: int) -> list[str]:
    """Return those that still differ at 5 % when all rivals are counted (Holm)."""
    pairs = compared(evidence, measure)
    return [
        arm
        for arm in apart(evidence, measure, sign=sign)
        if (pair := pairs[arm]) is not None and pair.p < 0.05
    ]


def compared(evidence: Evidence, measure: str) -> dict[str, PairedDifference | None]:
    """Return arm → its difference from softmax, p corrected for all of them."""
    arms = list(evidence.runs)
    pairs = corrected([difference(evidence, arm, measure) for arm in arms])
    return dict(zip(arms, pairs, strict=True))


def growth(evidence: Evidence, arm: str) -> float:
    """Return the effective keys at 4× over those at 1×."""
    return evidence.mean(arm, "keys_4x") / evidence.mean(arm, "keys_1x")


def _sentences(evidence: Evidence) -> list[str]:
    keeps = sorted(evidence.runs, key=lambda arm: growth(evidence, arm))
    steady = [arm for arm in keeps if growth(evidence, arm) < 2]
    others = [arm for arm in evidence.runs if arm != BASE]
    theta = {arm: evidence.mean(arm, "theta_4x") for arm in evidence.runs}
    return [
        f"Against softmax at the training length, {_list(evidence, '1x')}.",
        f"With four times the context, {_list(evidence, '4x')}.",
        f"Softmax spreads: {evidence.mean(BASE, 'keys_1x'):.0f} effective keys become "
        f"{evidence.mean(BASE, 'keys_4x'):.0f} ({growth(evidence, BASE):.1f} ×).",
        f"Less than doubling: {', '.join(steady) or 'none'}.",
        f"θ at 4×: {theta[BASE]:.2f} for softmax, "
        + ", ".join(f"{arm} {theta[arm]:.2f}" for arm in steady if arm != BASE)
        + ".",
        f"Losses are told apart at 5 % by Holm over {len(others)} rivals at each "
        f"length{_open(evidence)}.",
    ]


def _open(evidence: Evidence) -> str:
    """Say what sample the clearest of the undecided differences asks for."""
    found = [n for p in compared(evidence, "loss_4x").values() if (n := _seeds(p))]
    if not found:
        return ""
    return (
        f"; of those that are not, {min(found)} seeds would show the clearest with "
        "80 % power (4×)"
    )


def _seeds(pair: PairedDifference | None) -> int | None:
    return None if pair is None else seeds_to_decide(pair)


def _list(evidence: Evidence, at: str) -> str:
    worse = told_apart(evidence, f"loss_{at}", sign=1)
    better = told_apart(evidence, f"loss_{at}", sign=-1)
    parts = [
        f"{_named(evidence, arms, at)} {word}"
        for arms, word in ((better, "lose less"), (worse, "lose more"))
        if arms
    ]
    return (
        " and ".join(parts) + "; the rest cannot be told apart"
        if parts
        else ("no rival's loss can be told from it")
    )


def _named(evidence: Evidence, arms: Sequence[str], at: str) -> str:
    return ", ".join(
        f"{arm} ({pair.mean:+.2f})"
        for arm in arms
        if (pair := difference(evidence, arm, f"loss_{at}")) is not None
    )


def _cell(evidence: Evidence, arm: str, measure: str) -> str:
    found = [run[measure] for run in evidence.runs[arm].values() if measure in run]
    return str(summary(found)) if found else "–"


def _losses(evidence: Evidence) -> StudyGrid:
    short, long = (compared(evidence, f"loss_{m}x") for m in (1, 4))
    cells = [
        [
            f"{arm} ({len(evidence.runs[arm])})",
            *(_cell(evidence, arm, f"loss_{m}x") for m in TIMES),
            str(short[arm] or "–"),
            str(long[arm] or "–"),
        ]
        for arm in evidence.runs
    ]
    return StudyGrid(
        title="Loss on the same held-out targets with 1, 2 and 4 training lengths of "
        "context: mean ± sd over (seeds), and paired differences with 95 % intervals, "
        "p by Holm over the rivals",
        head=["", *(f"{m}×" for m in TIMES), "minus softmax, 1×", "minus softmax, 4×"],
        cells=cells,
    )


ATTENDING = {
    "theta": "θ",
    "keys": "effective keys",
    "peak": "largest share",
    "zeros": "share of exact zeros",
    "total": "total weight",
    "rho": "range of scores ρ",
}
SEPARABLE = {
    "recall": "N_s/N",
    "recall_random": "random sets",
    "cosine": "cosine",
    "cosine_random": "random sets, cosine",
    "distance": "d̃/(n − N)",
}
CHANGES = {
    "How the last queries attend, mean over layers, heads and seeds": ATTENDING,
    "Separability of the 8 largest weights' values, and d̃ per token": SEPARABLE,
}


def _changes(evidence: Evidence, title: str, columns: Mapping[str, str]) -> StudyGrid:
    cells = [
        [arm, *(_change(evidence, arm, name) for name in columns)]
        for arm in evidence.runs
    ]
    return StudyGrid(title=title, head=["1× → 4×", *columns.values()], cells=cells)


def _change(evidence: Evidence, arm: str, name: str) -> str:
    first, last = (evidence.mean(arm, f"{name}_{m}x") for m in (1, 4))
    return f"{first:.3g} → {last:.3g}"


def _figures(evidence: Evidence) -> list[Figure]:
    panels = (
        ("loss", "Held-out loss, same targets", "nats per token", False),
        ("keys", "Effective keys", "exp(entropy)", True),
        ("theta", "Sensitivity θ", "‖J‖, ∞→1", True),
    )
    shown = [arm for arm in evidence.runs if not arm.endswith("-learnt")]
    return [
        chart(
            f"{name}-over-context",
            title,
            [
                FigureLine(
                    name=arm,
                    x=TIMES,
                    y=[evidence.mean(arm, f"{name}_{m}x") for m in TIMES],
                )
                for arm in shown
            ],
            x="context, in training lengths",
            y=y,
            log="xy" if log else "x",
        )
        for name, title, y, log in panels
    ]
