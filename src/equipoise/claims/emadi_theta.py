"""Emadi (2026), §4 and App. E.2: what is claimed of θ, and rows that say otherwise."""

import torch
from torch import Tensor

from equipoise.claims.verdict import Verdict
from equipoise.numerics.balance import balance, sensitivity

PAPER = "emadi2026"
_TRIALS = 500
_LENGTHS = (4, 8, 12, 16)


def sorted_prefix(p_xK: Tensor) -> Tensor:
    """Return the paper's heuristic: the best 4 p(S)(1 - p(S)) over sorted prefixes."""
    mass = p_xK.sort(-1, descending=True).values.cumsum(-1)
    return (4 * mass * (1 - mass)).amax(-1)


def peaked_bound() -> Verdict:
    """Cor. 4.3(3): a bound for peaked rows, stated for every κ."""
    uniform = torch.full((10,), 0.1, dtype=torch.float64)
    kappa = 1 - float(uniform.max())
    peaked = _peaked_rows()
    top = peaked.amax(-1)
    theta, uniform_theta = balance(peaked), float(balance(uniform).lower)
    return Verdict(
        paper=PAPER,
        where="Cor. 4.3(3)",
        claim="A row whose top key holds 1 - κ has θ ≤ 4κ(1 - κ).",
        outcome="fails" if uniform_theta > 4 * kappa * (1 - kappa) else "holds",
        evidence={
            "kappa, uniform over 10 keys": kappa,
            "claimed bound": 4 * kappa * (1 - kappa),
            "theta": uniform_theta,
            "largest |theta - 4κ(1-κ)| for κ ≤ ½": float(
                (theta.lower - 4 * top * (1 - top)).abs().max()
            ),
        },
        instead="For κ ≤ ½ it is an equality, attained by S = {top}: θ = 4κ(1 - κ). "
        "For κ > ½ it says nothing.",
    )


def _peaked_rows() -> Tensor:
    """Return random rows whose largest key holds between ½ and 1 of the mass."""
    rng = torch.Generator().manual_seed(0)
    rest = torch.rand(200, 15, generator=rng, dtype=torch.float64)
    top = 0.5 + 0.5 * torch.rand(200, 1, generator=rng, dtype=torch.float64)
    return torch.cat([top, rest / rest.sum(-1, keepdim=True) * (1 - top)], -1)


def greedy_prefix() -> Verdict:
    """App. E.2: the heuristic on the paper's own protocol, N(0, I) scores and τ = 1."""
    rng = torch.Generator().manual_seed(0)
    wrong, worst = {}, 0.0
    for length in _LENGTHS:
        z = torch.randn(_TRIALS, length, generator=rng, dtype=torch.float64)
        p = z.softmax(-1)
        short = 1 - sorted_prefix(p) / balance(p).lower
        wrong[f"share of rows missed, L = {length}"] = float(
            (short > 1e-12).double().mean()
        )
        worst = max(worst, float(short.max()))
    return Verdict(
        paper=PAPER,
        where="App. E.2",
        claim="The sorted-prefix heuristic equals exhaustive search for L ≤ 16.",
        outcome="fails" if max(wrong.values()) > 0 else "holds",
        evidence={**wrong, "largest relative error": worst},
        instead="Sorted prefixes give a lower bound only. Use equipoise.balance: its "
        "interval is exact at these lengths, and faster.",
    )


def example_row() -> Verdict:
    """The paper's example row, given to the paper's heuristic."""
    p = torch.tensor([0.4, 0.1, 0.4, 0.1], dtype=torch.float64)
    theta, prefix = float(balance(p).lower), float(sorted_prefix(p))
    return Verdict(
        paper=PAPER,
        where="§4, example (.4, .1, .4, .1)",
        claim="The heuristic that measures θ in the experiments is exact on this row.",
        outcome="fails" if theta - prefix > 1e-9 else "holds",
        evidence={"theta": theta, "sorted prefix": prefix},
        instead="θ = 1, attained by one large and one small key on each side.",
    )


def one_throughout() -> Verdict:
    """§7: "θ/τ = 1.000 throughout", for causal attention."""
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 64, 16, generator=rng, dtype=torch.float64).unbind(0)
    by_query = sensitivity(q, k, causal=True).upper.amax(0)
    return Verdict(
        paper=PAPER,
        where="§7, θ during training",
        claim="In causal language models θ/τ is 1.000 in every row of a whole run.",
        outcome="fails" if float(by_query[0]) < 1 else "holds",
        evidence={
            "largest theta of query 0, over heads": float(by_query[0]),
            "largest theta of query 1, over heads": float(by_query[1]),
            "largest theta of query 63, over heads": float(by_query[-1]),
        },
        instead="Query 0 sees one key, so θ = 0; query 1 has θ = 4p(1 - p); a row with "
        "a sink of mass s ≥ ½ has 4s(1 - s). Report quantiles by head and position.",
    )
