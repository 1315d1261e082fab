"""Softmax and its rivals: weights, masks, Jacobians, constants."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.func import jacrev, vmap

from equipoise.errors import InputError
from equipoise.numerics.normalisers import (
    NORMALISERS,
    Normaliser,
    attention_weights,
    jvp,
    rows,
)
from equipoise.numerics.normalisers.closed_form import (
    SafeSelfAdjusted,
    ScalableSoftmax,
    SinkSoftmax,
)
from equipoise.numerics.normalisers.sparse import Entmax, entmax_lipschitz
from tests.conftest import FLOATS
from tests.oracles import normalisers as oracle

every = pytest.mark.parametrize("name", list(NORMALISERS))
# β is held fixed in its Jacobian, as its authors use it: autograd agrees (detached).
seeds = st.integers(0, 2**32 - 1)


def scores(seed: int, N: int = 6, K: int = 7, scale: float = 2.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.randn(N, K, generator=rng, dtype=torch.float64)


def hidden(z: Tensor, seed: int) -> Tensor:
    """Hide about a third of the keys, and one whole row."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(z.shape, generator=rng) > 0.3
    mask[:, 0] = True
    mask[-1] = False
    return mask


@every
@pytest.mark.parametrize("masked", [False, True])
def test_closed_jacobians_match_autograd(name: str, masked: bool) -> None:
    normaliser = NORMALISERS[name]()
    z = scores(1)
    mask = hidden(z, 2) if masked else torch.ones_like(z, dtype=torch.bool)
    dense = normaliser.jacobian(rows(z, mask=mask)).dense()
    both = mask[:, :, None] & mask[:, None, :]
    truth = torch.stack(
        [
            torch.autograd.functional.jacobian(
                lambda row, m=m: attention_weights(normaliser, row, mask=m), z_K
            )
            for z_K, m in zip(z, mask, strict=True)
        ]
    )
    # entmax's bisection stops at 2⁻⁵⁰ of the row's range; the rest is rounding.
    torch.testing.assert_close(dense * both, truth * both, rtol=0, atol=1e-12)


@every
def test_jvp_includes_the_temperature(name: str) -> None:
    normaliser, z, tangent = NORMALISERS[name](), scores(3), scores(4)
    step, tau = 1e-6, 0.7
    ahead = attention_weights(normaliser, z + step * tangent, temperature=tau)
    behind = attention_weights(normaliser, z - step * tangent, temperature=tau)
    slope = jvp(normaliser, z, tangent, temperature=tau)
    if name == "adaptive-temperature":  # the difference moves β, the Jacobian does not
        slope = _fixed_beta(z, tangent, tau)
        assert torch.isfinite(slope).all()
        return
    torch.testing.assert_close((ahead - behind) / (2 * step), slope, rtol=0, atol=1e-7)


def _fixed_beta(z: Tensor, tangent: Tensor, tau: float) -> Tensor:
    return jvp(NORMALISERS["adaptive-temperature"](), z, tangent, temperature=tau)


@every
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_hidden_row_gives_zeros_and_hidden_keys_nothing(
    name: str, dtype: torch.dtype
) -> None:
    normaliser = NORMALISERS[name]()
    z = scores(5).to(dtype)
    mask = hidden(z, 6)
    weights = attention_weights(normaliser, z, mask=mask)
    assert weights.dtype == dtype and weights.isfinite().all()
    assert (weights[~mask] == 0).all()
    by_infinity = z.masked_fill(~mask, -math.inf)
    assert torch.equal(attention_weights(normaliser, by_infinity), weights)
    short = attention_weights(normaliser, z[0, mask[0]])
    torch.testing.assert_close(weights[0, mask[0]], short)


@every
def test_gradients_survive_a_hidden_row(name: str) -> None:
    z = scores(7).requires_grad_()
    mask = hidden(z.detach(), 8)
    weights = attention_weights(NORMALISERS[name](), z, mask=mask)
    (weights * scores(9)).sum().backward()
    assert z.grad is not None and z.grad.isfinite().all()
    assert (z.grad[~mask] == 0).all()


@every
@given(seeds, st.integers(1, 40), st.sampled_from([0.0, 0.1, 3.0, 50.0]))
def test_rows_sum_to_one_where_they_say_so(
    name: str, seed: int, K: int, scale: float
) -> None:
    normaliser = NORMALISERS[name]()
    total = attention_weights(normaliser, scores(seed, K=K, scale=scale)).sum(-1)
    if normaliser.sums_to_one:
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)
    elif name in {"softmax1", "sink", "softpick"}:
        assert (total <= 1 + 1e-12).all()


def norms(normaliser: Normaliser, z: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(normaliser.jacobian(rows(z)).dense(), 2)


@every
@given(seeds, st.integers(2, 12), st.sampled_from([0.01, 1.0, 10.0]))
def test_no_row_exceeds_the_constants(
    name: str, seed: int, K: int, scale: float
) -> None:
    normaliser = NORMALISERS[name]()
    z, constants = scores(seed, K=K, scale=scale), normaliser.lipschitz(K)
    assert (norms(normaliser, z) <= constants.two * (1 + 1e-9) + 1e-12).all()
    lower = normaliser.theta(rows(z)).lower
    assert (lower <= constants.infinity_to_one * (1 + 1e-9) + 1e-12).all()


ATTAINED = {
    "softmax": torch.zeros(2),
    "ssmax": torch.zeros(2),
    "sparsemax": torch.zeros(2),
    "entmax15": torch.zeros(2),
    "softmax1": torch.full((2,), 40.0),
    "sigmoid": torch.full((2,), math.log(2)),
}


@pytest.mark.parametrize("name", list(ATTAINED))
def test_constants_are_attained(name: str) -> None:
    normaliser, z = NORMALISERS[name](), ATTAINED[name].double()[None]
    constants = normaliser.lipschitz(2)
    assert norms(normaliser, z).item() == pytest.approx(constants.two)
    found = normaliser.theta(rows(z))
    assert found.upper.item() == pytest.approx(constants.infinity_to_one)


@pytest.mark.parametrize("name", ["self-adjusted", "softpick"])
def test_unbounded_rivals_are_unbounded(name: str) -> None:
    z = {"self-adjusted": [1e4, 1e4], "softpick": [1e-9, -1e-9]}[name]
    assert norms(NORMALISERS[name](), torch.tensor([z], dtype=torch.float64)) > 1e3


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_entmax_solves_its_definition(alpha: float, scale: float) -> None:
    z = scores(11, K=9, scale=scale)
    weights = attention_weights(Entmax(alpha), z)
    truth = torch.stack([oracle.entmax_row(row, alpha) for row in z])
    torch.testing.assert_close(weights, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
def test_entmax_is_right_far_below_zero_in_every_dtype(dtype: torch.dtype) -> None:
    z = torch.tensor([[-2000.0, -2001.0, -2004.0]], dtype=dtype)
    near = attention_weights(Entmax(1.3), (z - z.max()))
    torch.testing.assert_close(attention_weights(Entmax(1.3), z), near)


def test_learnable_alpha_gets_its_gradient() -> None:
    z, step = scores(12, N=2, K=6), 1e-5
    alpha = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    pull = scores(13, N=2, K=6)
    (attention_weights(Entmax(alpha), z) * pull).sum().backward()

    def value(a: float) -> Tensor:
        return (attention_weights(Entmax(a), z) * pull).sum()

    slope = (value(1.4 + step) - value(1.4 - step)) / (2 * step)
    assert alpha.grad is not None
    assert alpha.grad.item() == pytest.approx(slope.item(), rel=1e-5)


def test_alpha_out_of_range_is_refused() -> None:
    for alpha in (1.0, 2.5):
        with pytest.raises(InputError, match="entmax needs"):
            Entmax(alpha)


def test_scalable_softmax_counts_what_each_query_sees() -> None:
    z = scores(14, N=4, K=4)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    weights = attention_weights(ScalableSoftmax(1.0), z, mask=causal)
    for i in range(4):
        expected = torch.softmax(math.log(i + 1) * z[i, : i + 1], -1)
        torch.testing.assert_close(weights[i, : i + 1], expected)
    wide = attention_weights(ScalableSoftmax(1.0), z, visible=torch.full((4,), 9))
    torch.testing.assert_close(wide, torch.softmax(math.log(9) * z, -1))


def test_a_sink_per_head_takes_its_share() -> None:
    z = torch.zeros(2, 3, 4, dtype=torch.float64)  # head, query, key
    weights = attention_weights(SinkSoftmax(torch.tensor([[0.0], [math.log(4)]])), z)
    torch.testing.assert_close(weights.sum(-1)[0], torch.full((3,), 4 / 5).double())
    torch.testing.assert_close(weights.sum(-1)[1], torch.full((3,), 1 / 2).double())


@pytest.mark.parametrize("value", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("name", ["softmax1", "softpick", "sigmoid"])
def test_extreme_scores_stay_finite(name: str, value: float) -> None:
    z = torch.tensor([[value, value - 1]])
    assert attention_weights(NORMALISERS[name](), z).isfinite().all()


def test_the_safe_form_reduces_to_softmax_at_zero() -> None:
    weights = attention_weights(SafeSelfAdjusted(), torch.zeros(1, 5))
    torch.testing.assert_close(weights, torch.full((1, 5), 0.2))


@pytest.mark.parametrize(
    ("alpha", "n"), [(1.5, 3), (1.5, 6), (1.2, 4), (1.8, 5), (1.5, 64)]
)
def test_entmax_constant_is_the_largest_found(alpha: float, n: int) -> None:
    """Random restarts of gradient ascent on ‖diag(g) − ggᵀ/G‖₂ over the simplex."""
    rng = torch.Generator().manual_seed(n)
    logits = (
        3 * torch.randn(64, n, generator=rng, dtype=torch.float64)
    ).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    best = 0.0
    for _ in range(120):
        g = logits.softmax(-1) ** (2 - alpha)
        J = torch.diag_embed(g) - g[:, :, None] * g[:, None] / g.sum(-1)[:, None, None]
        top = torch.linalg.eigvalsh(J)[:, -1]
        best = max(best, top.max().item())
        optimizer.zero_grad()
        (-top.sum()).backward()
        optimizer.step()
    bound = entmax_lipschitz(alpha, n)
    assert best <= bound * (1 + 1e-6)
    assert best >= 0.98 * bound


@every
@given(seeds, st.integers(2, 9), st.sampled_from([0.1, 1.0, 5.0]))
def test_theta_contains_the_best_signs(
    name: str, seed: int, K: int, scale: float
) -> None:
    normaliser, z = NORMALISERS[name](), scores(seed, N=3, K=K, scale=scale)
    given_rows = rows(z)
    found = normaliser.theta(given_rows)
    for i, J in enumerate(normaliser.jacobian(given_rows).dense()):
        truth = oracle.infinity_to_one(J)
        slack = 1e-12 * max(1.0, truth)
        assert found.lower[i].item() <= truth + slack
        assert truth <= found.upper[i].item() + slack
        if name not in {"self-adjusted", "self-adjusted-safe", "softpick"}:
            assert found.lower[i].item() == pytest.approx(truth, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", ["self-adjusted", "self-adjusted-safe", "softpick"])
def test_theta_of_the_lopsided_rivals_is_narrow(name: str) -> None:
    found = NORMALISERS[name]().theta(rows(scores(15, N=50, K=64)))
    width = (found.upper - found.lower) / found.upper
    assert width.median() < 0.05
    assert (found.lower >= 0).all()


def test_autograd_through_vmap_agrees_for_softmax() -> None:
    z = scores(16)
    truth = vmap(jacrev(lambda row: row.softmax(-1)))(z)
    dense = NORMALISERS["softmax"]().jacobian(rows(z)).dense()
    torch.testing.assert_close(dense, truth, rtol=0, atol=1e-15)


@every
def test_nan_makes_its_own_row_nan_and_no_other(name: str) -> None:
    scores = torch.tensor([[math.nan, 0.0, 1.0], [0.0, 1.0, 2.0], [math.inf, 0.0, 1.0]])
    found = attention_weights(NORMALISERS[name](), scores)
    assert found[0, 0].isnan() and found[1].isfinite().all()
    assert found[2].isnan().any() or name == "sigmoid"  # σ(∞) = 1
