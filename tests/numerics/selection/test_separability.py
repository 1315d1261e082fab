"""Recall, precision and margin against each token's own distance to the sum."""

import pytest
import torch

from equipoise.errors import InputError
from equipoise.numerics.selection import (
    Separability,
    random_separability,
    ranked_at_random,
    separability,
    weighted_tokens,
)
from equipoise.numerics.selection.distance import Metric
from tests.conftest import FLOATS
from tests.numerics.selection.specimens import normal, specimens
from tests.oracles import selection as oracle


def apart(
    count: int, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows without ties: softmax weights and normal tokens, some sharing a mean."""
    rng = torch.Generator().manual_seed(seed)
    w = normal(count, 1, 12, rng=rng).softmax(-1)
    shift = normal(count, 1, 1, rng=rng)
    return w.to(dtype), (shift + normal(count, 12, 5, rng=rng)).to(dtype)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("top", [1, 4, 11])
def test_the_fast_count_is_the_definition(
    metric: Metric, dtype: torch.dtype, top: int
) -> None:
    weights, tokens = apart(60, top, dtype)
    found = separability(weighted_tokens(weights, tokens), top, metric=metric)
    for n in range(60):
        w, x = weights[n, 0].double().numpy(), tokens[n].double().numpy()
        inside = oracle.largest(w, top)
        recall, precision, margin = oracle.separability(w, x, inside, metric=metric)
        assert found.recall[n].item() == pytest.approx(recall)
        assert found.precision[n].item() == pytest.approx(precision)
        assert found.margin[n].item() == pytest.approx(margin, abs=1e-7)


def test_f_is_the_harmonic_mean() -> None:
    found = Separability(
        recall=torch.tensor([0.5, 0.0]),
        precision=torch.tensor([0.25, 0.5]),
        margin=torch.zeros(2),
    )
    torch.testing.assert_close(found.f, torch.tensor([1 / 3, 0.0]))


def test_a_tie_stays_a_tie_however_it_rounds() -> None:
    """Identical tokens and weights: nobody is strictly nearer than the rest."""
    rng = torch.Generator().manual_seed(0)
    x = normal(1, 67, rng=rng).expand(33, 67)
    found = separability(weighted_tokens(torch.full((1, 33), 1 / 33), x), 5)
    assert found.recall.item() == 0
    assert found.precision.item() == pytest.approx(5 / 33)


def test_ties_in_weight_go_to_the_lower_key() -> None:
    given = weighted_tokens(torch.tensor([[0.2, 0.3, 0.3, 0.2]]), torch.eye(4))
    assert given.rank_xQK.tolist() == [[2, 0, 1, 3]]
    many = weighted_tokens(torch.full((1, 3000), 0.1), torch.ones(3000, 1))
    assert many.rank_xQK.tolist() == [list(range(3000))]


def test_random_rankings_are_permutations_of_the_visible(rng: torch.Generator) -> None:
    mask = torch.rand(40, 9, generator=rng) < 0.7
    mask[:, 0] = True
    given = weighted_tokens(torch.ones(40, 9), torch.ones(9, 2), mask=mask)
    order = ranked_at_random(given, rng)
    for seen, rank in zip(mask, order.rank_xQK, strict=True):
        assert sorted(rank.tolist()) == list(range(9))
        assert sorted(rank[seen].tolist()) == list(range(int(seen.sum())))


def test_random_rankings_are_uniform(rng: torch.Generator) -> None:
    """Each of 4 visible keys comes first a quarter of the time: 1000 draws, 5σ."""
    mask = torch.tensor([[True, False, True, True, True]])
    given = weighted_tokens(torch.ones(1, 5), torch.ones(5, 2), mask=mask)
    first = torch.zeros(5)
    for _ in range(1000):
        first += ranked_at_random(given, rng).rank_xQK[0] == 0
    assert first[1] == 0
    sigma = (1000 * 0.25 * 0.75) ** 0.5
    assert ((first[mask[0]] - 250).abs() < 5 * sigma).all()


def test_the_control_is_the_mean_over_its_rankings() -> None:
    weights, tokens = apart(8, 3, torch.float64)
    given = weighted_tokens(weights, tokens)
    found = random_separability(
        given, 4, generator=torch.Generator().manual_seed(1), draws=3
    )
    rng = torch.Generator().manual_seed(1)
    each = [separability(ranked_at_random(given, rng), 4) for _ in range(3)]
    torch.testing.assert_close(found.recall, sum(e.recall for e in each) / 3)
    torch.testing.assert_close(found.precision, sum(e.precision for e in each) / 3)
    torch.testing.assert_close(found.margin, sum(e.margin for e in each) / 3)


def test_the_control_of_flat_weights_is_the_selection_itself() -> None:
    """With equal weights and exchangeable tokens ranking by weight is chance."""
    rng = torch.Generator().manual_seed(2)
    weights = torch.full((1500, 1, 32), 1 / 32)
    given = weighted_tokens(weights, normal(1500, 32, 8, rng=rng))
    true = separability(given, 4).recall
    control = random_separability(given, 4, generator=rng, draws=4).recall
    noise = 5 * true.std() / 1500**0.5
    assert (true.mean() - control.mean()).abs() < noise


def test_broken_rows_and_rows_without_a_rest_are_nan() -> None:
    weights, tokens = specimens(64, seed=0, K=6, D=4)
    weights[3, 0, 2] = float("nan")
    for metric in ("euclidean", "cosine"):
        found = separability(weighted_tokens(weights, tokens), 3, metric=metric)  # type: ignore[arg-type]
        assert found.recall.isnan().flatten().nonzero().tolist() == [[3]]
        whole = separability(weighted_tokens(weights, tokens), 6, metric=metric)  # type: ignore[arg-type]
        assert whole.recall.isnan().all() and whole.f.isnan().all()


def test_broken_options(rng: torch.Generator) -> None:
    given = weighted_tokens(torch.ones(1, 3), torch.eye(3))
    with pytest.raises(InputError, match="euclidean, cosine"):
        separability(given, 1, metric="manhattan")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least one ranking"):
        random_separability(given, 1, generator=rng, draws=0)
