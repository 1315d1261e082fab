"""The bound on a block, with all that a block may have: never below a dense Hessian."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.theory.lipschitz.heads import Heads, Rotary
from equipoise_lab.theory.curvature.attention_bounds import top
from equipoise_lab.theory.curvature.block_bounds import (
    PostNormBlock,
    block_curvature_bound,
    block_curvature_norms,
)
from equipoise_lab.theory.curvature.feedforward import FeedForwardCurvature
from lab.tests.theory.curvature_draws import Draw
from tests.oracles import curvature as oracle

# Two computations of one norm; a bound may be attained.
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Case:
    """ℓ(z) = ⟨g, z⟩ + ½⟨z − z₀, S(z − z₀)⟩ at z₀, the output: S couples tokens."""

    block: PostNormBlock
    x: Tensor
    g: Tensor
    seen: Tensor
    s: Tensor

    @property
    def weights(self) -> tuple[Tensor, ...]:
        net = self.block.net
        entering = [w for w in (net.w_in_DM, net.w_up_DM) if w is not None]
        return *self.block.heads.weights[:3], *entering, net.w_out_MO

    def output(self, *weights: Tensor) -> Tensor:
        q, k, v, w_in, *w_up, w_out = weights
        block, x, times = self.block, self.x, len(q) // len(k)
        k, v = (w.repeat_interleave(times, 0) for w in (k, v))
        scores = self.rotate(x @ q) @ self.rotate(x @ k).mT / q.shape[-1] ** 0.5
        rows = scores.masked_fill(~self.seen, -torch.inf).softmax(-1)
        first = x + (rows @ (x @ v) @ block.heads.w_o_HFD).sum(0) + block.b_o_D
        y = oracle.norm(first, block.gain_1_D, eps=block.eps, centred=True)
        y = y + block.shift_1_D
        hidden = oracle.ACTIVATIONS[block.net.activation](y @ w_in + block.net.b_in_M)
        for up in w_up:
            hidden = hidden * (y @ up)
        second = y + hidden @ w_out + block.b_out_D
        return oracle.norm(second, block.gain_2_D, eps=block.eps, centred=True)

    def rotate(self, u_HLE: Tensor) -> Tensor:
        """Rotate as a complex number: the first and second channel of each head."""
        rotary = self.block.heads.rotary
        if rotary is None:
            return u_HLE
        turn_L = torch.complex(rotary.cos_LR[:, 0], rotary.sin_LR[:, 0])
        pair = torch.complex(u_HLE[..., 0], u_HLE[..., 1]) * turn_L
        return torch.cat([torch.view_as_real(pair), u_HLE[..., 2:]], -1)

    def hessian(self) -> Tensor:
        held = self.output(*self.weights).detach()

        def loss(*weights: Tensor) -> Tensor:
            z = self.output(*weights)
            off = (z - held).flatten()
            return (self.g * z).sum() + off @ self.s @ off / 2

        return oracle.whole_hessian(loss, self.weights)

    def bound(self) -> float:
        return block_curvature_bound(self.block, self.x, self.g, **self._given)

    def norms(self) -> Tensor:
        return block_curvature_norms(self.block, self.x, self.g, **self._given)

    @property
    def _given(self) -> dict[str, Any]:
        return {"loss_curvature": top(self.s), "mask": self.seen}

    def places(self) -> list[tuple[list[int], slice]]:
        """Return where each weight stands among the bounds, and in the Hessian."""
        heads = self.block.heads.weights[:3]
        H = len(heads[0])
        among = [
            [3 * h + kind for h in range(g * H // len(w), (g + 1) * H // len(w))]
            for kind, w in enumerate(heads)
            for g in range(len(w))
        ]
        sizes = [w[0].numel() for w in heads for _ in w]
        *entering, out = self.weights[3:]
        sizes += [sum(w.numel() for w in entering), out.numel()]
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        found = [slice(a, b) for a, b in pairwise(ends)]
        return list(zip([*among, [3 * H], [3 * H + 1]], found, strict=True))


def case_of(
    seed: int,
    *,
    heads: tuple[int, int] = (4, 2),
    L: int = 4,
    gated: bool = False,
    turned: bool = False,
) -> Case:
    """Return a block with every size, every bias and every mask drawn."""
    draw = Draw(seed)
    (H, G), D, E, F = heads, draw.number(3, 4), draw.number(1, 2), draw.number(1, 2)
    M, E = draw.number(2, 6), E + 1 if turned else E

    def some(*shape: int) -> Tensor:
        return draw.normal(*shape, scale=draw.choice([0.1, 0.5, 1.0, 3.0]))

    s = draw.normal(L * D, L * D)
    return Case(
        block=PostNormBlock(
            heads=Heads(
                w_q_HDE=some(H, D, E),
                w_k_GDE=some(G, D, E),
                w_v_GDF=some(G, D, F),
                w_o_HFD=some(H, F, D),
                rotary=turning(draw, L) if turned else None,
            ),
            net=FeedForwardCurvature(
                w_in_DM=some(D, M),
                w_up_DM=some(D, M) if gated else None,
                w_out_MO=some(M, D),
                b_in_M=some(M),
                activation=draw.choice(["gelu", "relu", "silu", "tanh"]),
            ),
            gain_1_D=some(D),
            gain_2_D=some(D),
            shift_1_D=some(D),
            eps=draw.choice([1e-5, 0.1, 1.0]),
            b_o_D=some(D),
            b_out_D=some(D),
        ),
        x=some(L, D),
        g=some(L, D),
        seen=draw.seen(L),
        s=draw.choice([0.0, 0.1, 1.0]) * (s + s.mT),
    )


def turning(draw: Draw, L: int) -> Rotary:
    """Return turns by any angle, which may stretch all alike."""
    angle_L1, size = draw.normal(L, 1, scale=3.0), draw.choice([0.7, 1.0, 1.3])
    cos_LR, sin_LR = (
        size * turn.expand(-1, 2) for turn in (angle_L1.cos(), angle_L1.sin())
    )
    return Rotary(cos_LR=cos_LR, sin_LR=sin_LR, interleaved=draw.choice([True, False]))


KINDS = {
    "plain": case_of,
    "gated": partial(case_of, gated=True),
    "turned": partial(case_of, turned=True),
    "both": partial(case_of, gated=True, turned=True),
}
of_every_kind = pytest.mark.parametrize("drawn", KINDS.values(), ids=KINDS)


@of_every_kind
def test_the_bound_holds_with_every_option_of_a_block(
    drawn: Callable[..., Case],
) -> None:
    cases = map(drawn, range(25))
    ratios = [case.bound() * ROUNDING / top(case.hessian()) for case in cases]
    assert min(ratios) >= 1 and statistics.median(ratios) <= 20


def equal_heads(seed: int) -> Case:
    """Return a block of four equal heads on one W_K and one W_V."""
    case = case_of(seed, heads=(1, 1))
    q, k, v, o = case.block.heads.weights
    heads = Heads(
        w_q_HDE=q.expand(4, -1, -1),
        w_k_GDE=k,
        w_v_GDF=v,
        w_o_HFD=o.expand(4, -1, -1),
    )
    return replace(case, block=replace(case.block, heads=heads))


TWO = [partial(drawn, heads=(2, 2)) for drawn in KINDS.values()]


@pytest.mark.parametrize("drawn", [*TWO, equal_heads], ids=[*KINDS, "equal heads"])
def test_every_block_of_the_hessian_has_its_own_bound(
    drawn: Callable[[int], Case],
) -> None:
    for case in map(drawn, range(25)):
        truth, bounds = case.hessian(), case.norms()
        # Blocks that are zero are rounding next to the largest.
        slack = 1e-12 * top(truth)
        for (one, rows), (other, columns) in product(case.places(), repeat=2):
            bound = top(bounds[one][:, other])
            assert top(truth[rows, columns]) <= bound * ROUNDING + slack


@of_every_kind
@pytest.mark.parametrize(("slope", "curvature"), [(1.0, 0.0), (0.0, 1.0)])
def test_one_token_has_no_sum_to_bound(
    drawn: Callable[..., Case], slope: float, curvature: float
) -> None:
    # W_out meets itself in the second norm and in the loss: each alone is attained.
    for seed in range(8):
        case = drawn(seed, L=1)
        s = curvature * torch.eye(len(case.s)).to(case.s)
        case = replace(case, s=s, g=slope * case.g)
        _, place = case.places()[-1]
        truth = top(case.hessian()[place, place])
        assert float(case.norms()[-1, -1]) == pytest.approx(truth, rel=1e-8, abs=1e-14)


def broken(holder: Any, name: str, value: float) -> Any:
    """Return the same with one entry of one tensor set."""
    tensor = getattr(holder, name).clone()
    tensor.view(-1)[0] = value
    return replace(holder, **{name: tensor})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_nan_in_any_input_gives_nan(activation: str, value: float) -> None:
    case = case_of(0, gated=True, turned=True)
    block = replace(case.block, net=replace(case.block.net, activation=activation))
    held = ("gain_1_D", "gain_2_D", "shift_1_D", "b_o_D", "b_out_D")
    given = [broken(block, name, value) for name in held]
    for part, names in (
        ("heads", ("w_q_HDE", "w_k_GDE", "w_v_GDF", "w_o_HFD")),
        ("net", ("w_in_DM", "w_up_DM", "w_out_MO")),
    ):
        inner = [broken(getattr(block, part), name, value) for name in names]
        given += [replace(block, **{part: changed}) for changed in inner]
    cases = [replace(case, block=changed) for changed in given]
    for one in [*cases, broken(case, "x", value), broken(case, "g", value)]:
        assert math.isnan(one.bound()) and one.norms().isnan().all()
