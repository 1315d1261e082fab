"""d̃, its bounds and its expectation against sums of norms and all subsets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.selection import (
    chosen,
    distance,
    distance_of,
    published_bound,
    ranked_at_random,
    weighted_tokens,
)
from tests.conftest import FLOATS
from tests.numerics.selection.specimens import specimens
from tests.oracles import selection as oracle

K, D = 7, 3
# Distances come from squares in float64: right to √(ops·ε) of ‖s‖ ≤ 1e3 at worst.
ATOL = 1e-5


def row(w: Tensor, x: Tensor) -> tuple[oracle.Row, oracle.Row]:
    return w.double().flatten().numpy(), x.double().numpy()


@pytest.mark.parametrize("top", [1, 2, 5, 6])
def test_distance_and_expectation_are_those_of_the_definition(top: int) -> None:
    weights, tokens = specimens(64, seed=top, K=K, D=D)
    found = distance(weighted_tokens(weights, tokens), top)
    for n, (w, x) in enumerate(map(row, weights, tokens)):
        true = oracle.distance(w, x, oracle.largest(w, top))
        assert found.value[n].item() == pytest.approx(true, rel=1e-7, abs=ATOL)
        assert found.per_token[n].item() == pytest.approx(true / (K - top), abs=ATOL)
        mean = oracle.expected(w, x, top)
        assert found.expected_lower[n].item() <= mean * (1 + 1e-7) + ATOL
        assert found.expected_upper[n].item() >= mean * (1 - 1e-7) - ATOL
        if mean > ATOL:
            lift = true / mean
            assert found.lift_lower[n].item() <= lift * (1 + 1e-6)
            assert found.lift_upper[n].item() >= lift * (1 - 1e-6)


@pytest.mark.parametrize("top", [1, 3, 6])
def test_the_published_bound_is_theirs(top: int) -> None:
    weights, tokens = specimens(64, seed=top, K=K, D=D)
    found = published_bound(chosen(weighted_tokens(weights, tokens), top))
    for n, (w, x) in enumerate(map(row, weights, tokens)):
        theirs = oracle.theorem_1(w, x, oracle.largest(w, top))
        assert found[n].item() == pytest.approx(theirs, rel=1e-6, abs=1e-6)


def test_any_set_of_keys_obeys_the_bounds(rng: torch.Generator) -> None:
    weights, tokens = specimens(64, seed=5, K=K, D=D)
    order = ranked_at_random(weighted_tokens(weights, tokens), rng)
    picked = chosen(order, 3)
    found, published = distance_of(picked), published_bound(picked)
    for n, (w, x) in enumerate(map(row, weights, tokens)):
        inside = set(picked.inside_xQK[n, 0].nonzero().flatten().tolist())
        assert len(inside) == 3
        true = oracle.distance(w, x, inside)
        assert found.value[n].item() == pytest.approx(true, rel=1e-7, abs=ATOL)
        assert found.lower[n].item() <= true * (1 + 1e-7) + ATOL
        assert found.upper[n].item() >= true * (1 - 1e-7) - ATOL
        assert published[n].item() >= true * (1 - 1e-7) - ATOL


def test_signed_weights_that_cancel_still_have_bounds() -> None:
    """Plain self-adjusted weights can sum to 0 over the set: then there is no s/ᾱ."""
    w = torch.tensor([[0.5, -0.5, 0.3, 0.1]]).double()
    x = torch.eye(4).double()
    ranked = weighted_tokens(w, x)
    order = torch.tensor([[0, 1, 2, 3]])
    picked = chosen(type(ranked)(**{**_fields(ranked), "rank_xQK": order}), 2)
    assert picked.mass_xQ.item() == 0
    found = distance_of(picked)
    true = oracle.distance(*row(w, x), {0, 1})
    assert found.value.item() == pytest.approx(true)
    assert found.lower.item() <= true <= found.upper.item()
    assert published_bound(picked).isnan().all()


def _fields(given_rows: object) -> dict[str, Tensor]:
    return {name: getattr(given_rows, name) for name in type(given_rows).__slots__}  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes_are_read_as_they_are(dtype: torch.dtype) -> None:
    """Narrow inputs are widened first, so they agree with float64 of the same bits."""
    weights, tokens = (t.to(dtype) for t in specimens(64, seed=0, K=K, D=D))
    found = distance(weighted_tokens(weights, tokens), 2)
    exact = distance(weighted_tokens(weights.double(), tokens.double()), 2)
    assert found.value.dtype == torch.float64
    torch.testing.assert_close(found.value, exact.value, rtol=0, atol=0)


@given(st.integers(0, 10**6), st.integers(1, 5), st.floats(0.01, 100))
@settings(max_examples=25)
def test_invariances(seed: int, top: int, factor: float) -> None:
    """Turning all tokens changes nothing; scaling scales; hidden keys do not exist."""
    weights, tokens = specimens(1, seed=seed, K=K, D=D)
    rng = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(K, K, generator=rng, dtype=torch.float64))
    plain = distance(weighted_tokens(weights, tokens), top)
    turned = distance(weighted_tokens(weights, factor * tokens @ turn), top)
    noise = torch.randn(len(tokens), 2, K, generator=rng, dtype=torch.float64)
    longer = torch.cat([noise[:, :1], tokens, noise[:, 1:]], 1)
    padded = torch.nn.functional.pad(weights, (1, 1), value=0.9)
    mask = torch.nn.functional.pad(torch.ones(K, dtype=torch.bool), (1, 1))
    hidden = distance(weighted_tokens(padded, longer, mask=mask), top)
    for name in ("value", "upper", "lower", "expected_lower", "expected_upper"):
        mine = getattr(plain, name)
        close = {"rtol": 1e-6, "atol": 1e-4}
        torch.testing.assert_close(getattr(turned, name) / factor, mine, **close)
        torch.testing.assert_close(getattr(hidden, name), mine, **close)


def test_rows_without_a_rest_and_broken_rows_are_nan() -> None:
    weights = torch.full((6, 4), 0.25)
    weights[1, 2] = float("nan")
    tokens = torch.eye(4)
    tokens[3, 0] = float("inf")
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[:4, 3] = False
    mask[5, 2:] = False  # as many keys as are chosen
    mask[2, 1:] = False
    mask[3] = False
    found = distance(weighted_tokens(weights, tokens, mask=mask), 2)
    assert found.value.isnan().tolist() == [False, True, True, True, True, True]
    assert found.expected_upper.isnan().tolist() == [
        False,
        True,
        True,
        True,
        True,
        True,
    ]
    assert published_bound(
        chosen(weighted_tokens(weights, tokens, mask=mask), 2)
    ).isnan().tolist() == [False, True, True, True, True, True]


@pytest.mark.parametrize(
    ("weights", "tokens", "mask", "says"),
    [
        (torch.ones(3), torch.ones(3, 2), None, "two axes"),
        (torch.ones(1, 3, dtype=torch.int64), torch.ones(3, 2), None, "float"),
        (torch.ones(1, 3), torch.ones(4, 2), None, "must agree"),
        (torch.ones(2, 1, 3), torch.ones(5, 3, 2), None, "must agree"),
        (torch.ones(1, 0), torch.ones(0, 2), None, "must agree"),
        (torch.ones(1, 3), torch.ones(3, 2), torch.ones(1, 3), "boolean"),
    ],
)
def test_broken_inputs(
    weights: Tensor, tokens: Tensor, mask: Tensor | None, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        weighted_tokens(weights, tokens, mask=mask)


def test_a_selection_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="at least one key"):
        chosen(weighted_tokens(torch.ones(1, 3), torch.eye(3)), 0)


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-12])
def test_tokens_that_are_alike_have_no_lift_whatever_the_last_bit(
    noise: float,
) -> None:
    """Two equal tokens, equally weighed: d̃ and its expectation are both rounding."""
    rng = torch.Generator().manual_seed(0)
    token = torch.randn(1, 8, generator=rng, dtype=torch.float64).expand(2, 8)
    token = token + noise * torch.randn(2, 8, generator=rng, dtype=torch.float64)
    found = distance(weighted_tokens(torch.full((1, 2), 0.5), token), 1)
    assert found.lift_lower.isnan().all() and not found.lift_upper.isfinite().any()
