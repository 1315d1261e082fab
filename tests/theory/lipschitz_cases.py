"""Attention layers of every kind we claim to cover, with small dense Jacobians."""

from dataclasses import dataclass, replace

import hypothesis.strategies as st
import torch
from torch import Tensor

from equipoise.theory.lipschitz.heads import HeadNorm, Heads, rotary


@dataclass(frozen=True)
class Case:
    heads: Heads
    x: Tensor
    mask: Tensor | None = None


def plain(
    seed: int = 0, *, gain: float = 1.0, biased: bool = False, **size: int
) -> Case:
    """Return Gaussian weights and tokens, in float64; sizes D H G E F L."""
    rng = torch.Generator().manual_seed(seed)
    D, H, E, L = (size.get(k, n) for k, n in zip("DHEL", (8, 2, 4, 5), strict=True))
    G, F = size.get("G", H), size.get("F", E)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def weight(*shape: int) -> Tensor:
        return gain * D**-0.5 * normal(*shape)

    biases = dict(b_q_HE=normal(H, E), b_k_GE=normal(G, E), b_v_GF=normal(G, F))
    heads = Heads(
        w_q_HDE=weight(H, D, E),
        w_k_GDE=weight(G, D, E),
        w_v_GDF=weight(G, D, F),
        w_o_HFD=weight(H, F, D),
        **(biases if biased else {}),
    )
    return Case(heads, normal(L, D))


def cast(heads: Heads, dtype: torch.dtype) -> Heads:
    """Return the same layer with every weight and bias rounded to a dtype."""
    tensors = {n: getattr(heads, n) for n in Heads.__slots__ if n[:2] in {"w_", "b_"}}
    given = {n: t.to(dtype) for n, t in tensors.items() if t is not None}
    return replace(heads, **given)


ROTATIONS = {
    "none": None,
    "halves": rotary(5, 4),
    "neighbours": rotary(5, 4, interleaved=True),
    "partial": rotary(5, 2),
}
GAIN = torch.tensor([0.5, 1.0, -1.5, 2.0], dtype=torch.float64)
NORMS = {
    "none": None,
    "rms": HeadNorm(gain_E=GAIN, eps=0.1),
    "layer": HeadNorm(gain_E=GAIN, eps=0.1, centred=True),
}
MASKS = {
    "none": None,
    "padding": torch.tensor([True, True, True, False, False]),
    "blind": torch.tensor([[True] * 5, [False] * 5, *[[True] * 5] * 3]),
    "added": torch.linspace(-2, 1, 25, dtype=torch.float64).view(5, 5),
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a layer: every option at once, each independent of the others."""
    H, G = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (2, 1)]))
    case = plain(
        draw(st.integers(0, 2**32 - 1)),
        gain=draw(st.sampled_from([0.3, 1.0, 3.0])),
        biased=draw(st.booleans()),
        H=H,
        G=G,
        F=draw(st.sampled_from([3, 4])),
    )
    heads = replace(
        case.heads,
        causal=draw(st.booleans()),
        temperature=draw(st.sampled_from([1.0, 0.5, 3.0])),
        scale=draw(st.sampled_from([None, 1.0])),
        softcap=draw(st.sampled_from([None, 2.0])),
        rotary=ROTATIONS[draw(st.sampled_from(sorted(ROTATIONS)))],
        q_norm=NORMS[draw(st.sampled_from(sorted(NORMS)))],
        k_norm=NORMS[draw(st.sampled_from(sorted(NORMS)))],
    )
    return Case(heads, case.x, MASKS[draw(st.sampled_from(sorted(MASKS)))])
