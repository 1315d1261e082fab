"""Written-out derivatives and Newton's threshold against autograd and the library."""

import math

import entmax
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from equipoise.numerics.normalisers import NORMALISERS, attention_weights
from equipoise.numerics.normalisers import sparse as threshold
from equipoise.numerics.normalisers.closed_form import ScalableSoftmax, SinkSoftmax
from equipoise.numerics.normalisers.sparse import Entmax
from tests.oracles import normalisers as oracle

LIBRARY = {2.0: entmax.sparsemax, 1.5: entmax.entmax15}
seeds = st.integers(0, 2**32 - 1)


def scores(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("alpha", sorted(LIBRARY))
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_newton_agrees_with_the_librarys_sorting(
    alpha: float, scale: float, dtype: torch.dtype
) -> None:
    z = scores(0, 40, 301, scale=scale).to(dtype)
    ours, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
    pull = scores(1, 40, 301).to(dtype)
    found, truth = attention_weights(Entmax(alpha), ours), LIBRARY[alpha](theirs)
    (found * pull).sum().backward()
    (truth * pull).sum().backward()
    # The library's 1.5 takes the root of a difference: half its digits near a plateau.
    loose = alpha == 1.5 or dtype == torch.float32
    torch.testing.assert_close(found, truth, rtol=0, atol=2e-6 if loose else 1e-14)
    if scale:  # with all scores equal both take every key, or one rounds it away
        close = (found > 0) == (truth > 0)
        assert close.double().mean() > 0.999
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(
            ours.grad * close, theirs.grad * close, rtol=0, atol=2e-3 if loose else 1e-9
        )


@given(seeds, st.integers(1, 60), st.sampled_from([1.01, 1.1, 1.3, 1.7, 1.99]))
def test_any_alpha_against_bisection(seed: int, K: int, alpha: float) -> None:
    z = scores(seed, 4, K, scale=3.0)
    found = attention_weights(Entmax(alpha), z)
    truth = entmax.entmax_bisect(z, alpha, n_iter=80)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize("alpha", [1.01, 1.05, 1.3, 1.5, 1.9])
def test_the_slope_in_alpha_is_a_difference_quotient(alpha: float) -> None:
    z, pull, step = scores(2, 3, 9), scores(3, 3, 9), 1e-6
    learnt = torch.full((3,), alpha, dtype=torch.float64, requires_grad=True)
    (attention_weights(Entmax(learnt), z) * pull).sum().backward()
    assert learnt.grad is not None
    for row, slope in enumerate(learnt.grad):
        ahead, behind = (
            (oracle.entmax_row(z[row], a) * pull[row]).sum()
            for a in (alpha + step, alpha - step)
        )
        truth = (ahead - behind) / (2 * step)
        assert slope.item() == pytest.approx(truth.item(), rel=1e-4, abs=1e-6)


def test_rows_are_solved_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    z, alpha = scores(4, 3, 5, 7, 11), torch.linspace(1.1, 1.9, 5)[:, None].double()
    whole = attention_weights(Entmax(alpha), z)
    monkeypatch.setattr(threshold, "_CACHED", 25)
    # Rows stop together with those beside them: a last step more or less.
    torch.testing.assert_close(
        attention_weights(Entmax(alpha), z), whole, rtol=0, atol=1e-14
    )
    head = attention_weights(Entmax(alpha[3].item()), z[:, 3])
    torch.testing.assert_close(whole[:, 3], head)


@pytest.mark.parametrize("name", ["self-adjusted", "self-adjusted-safe", "softpick"])
@pytest.mark.parametrize("high", [3.0, 200.0])
def test_written_out_gradients_are_those_of_the_formula(name: str, high: float) -> None:
    """Also where softpick has to shift its exponentials."""
    z = scores(5, 6, 8)
    z[0, 0] = high
    ours, plain = z.clone().requires_grad_(), z.clone().requires_grad_()
    pull = scores(6, 6, 8)
    (attention_weights(NORMALISERS[name](), ours) * pull).sum().backward()
    (oracle.FORMULAS[name](plain) * pull).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", list(NORMALISERS))
def test_the_layout_of_the_scores_does_not_matter(name: str) -> None:
    z, pull = scores(10, 5, 3, 4), scores(11, 3, 5, 4)
    turned = z.transpose(0, 1).requires_grad_()
    plain = z.transpose(0, 1).contiguous().requires_grad_()
    found, truth = (attention_weights(NORMALISERS[name](), x) for x in (turned, plain))
    assert torch.equal(found, truth)
    slopes = [
        torch.autograd.grad((w * pull).sum(), x)[0]
        for w, x in ((found, turned), (truth, plain))
    ]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-15)


def test_a_learnt_factor_and_a_learnt_sink_get_their_gradient() -> None:
    z = scores(7, 2, 3, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    pull = scores(8, 2, 3, 5, 5)
    for made, start in (
        (lambda s: ScalableSoftmax(s[:, None, None]), [0.5, 0.0, -0.3]),
        (lambda b: SinkSoftmax(b[:, None]), [0.0, 3.0, -2.0]),
    ):
        values = torch.tensor(start, dtype=torch.float64)
        assert torch.autograd.gradcheck(
            lambda v, made=made: (attention_weights(made(v), z) * pull).sum((0, 2, 3)),
            values.requires_grad_(),
        )


def test_hidden_keys_stay_hidden_under_a_factor_of_zero() -> None:
    z = torch.tensor([[1.0, 2.0, -math.inf]])
    found = attention_weights(ScalableSoftmax(torch.tensor(0.0)), z)
    assert found.tolist() == [[0.5, 0.5, 0.0]]


def test_differentiating_twice_is_refused_not_wrong() -> None:
    z = scores(9, 2, 4).requires_grad_()
    for name in ("entmax15", "sink", "self-adjusted", "softpick"):
        total = attention_weights(NORMALISERS[name](), z).square().sum()
        (slope,) = torch.autograd.grad(total, z, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.sum().backward()
