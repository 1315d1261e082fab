"""Norms without a start: followed until they are near."""

import pytest
import torch
from torch import Tensor

from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.sharding import WHOLE, Split
from equipoise.numerics.spectra.sharded_norm import share_of_image
from equipoise.probes.gain import FAR, LETTERS, ShardedNorms
from equipoise.probes.sharding import Shard
from tests.probes.reading import Emitter, gpt

WIDTH = 100


def drawn(seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(WIDTH, WIDTH, generator=rng) / WIDTH**0.5


def sample(
    norms: ShardedNorms, maps: dict[str, Tensor]
) -> tuple[dict[str, float], dict[str, list[str]]]:
    """One exchange of two ranks; the output map is whole on both."""
    ranks: list[dict[str, Shard]] = [{}, {}]
    for letter, matrix in maps.items():
        name = f"s|{letter}"
        for i, shard in enumerate(matrix.chunk(2)):
            if letter == "o":
                part = Shard(torch.linalg.matrix_norm(matrix, 2), WHOLE)
            else:
                basis = norms._directions(name, WIDTH)
                part = Shard(share_of_image(shard, basis), Split(i, 2))
            ranks[i][name] = part
    emit = Emitter()
    norms.read(ranks, emit)
    found = {quantity: float(values) for (_, quantity), values in emit.found.items()}
    return found, emit.reasons


def test_a_norm_without_a_start_waits_until_it_is_near() -> None:
    anatomy = anatomy_of(gpt())
    norms = ShardedNorms()
    assert norms.begin(anatomy) == 0, "nothing here is sharded"
    maps = {letter: drawn(i) for i, letter in enumerate(LETTERS)}
    maps["q"][:, 0] *= 20  # far from any direction drawn at random
    first, reasons = sample(norms, maps)
    assert first.keys() == {"projection.norm.error"} and first.popitem()[1] > 0.1
    assert reasons == {"s": [FAR]}
    for _ in range(10):
        last, _ = sample(norms, maps)
    product = 1.0
    for letter, matrix in maps.items():
        truth = float(torch.linalg.svdvals(matrix)[0])
        assert last[f"projection.norm.{letter}"] == pytest.approx(truth, rel=1e-4)
        product *= truth
    assert last["projection.G"] == pytest.approx(product, rel=4e-4)


def test_a_rank_that_is_missing_leaves_nothing_to_read() -> None:
    norms = ShardedNorms()
    norms.begin(anatomy_of(gpt()))
    part = Shard(share_of_image(drawn(0), norms._directions("s|q", WIDTH)), Split(0, 2))
    emit = Emitter()
    norms.read([{"s|q": part}, {}], emit)
    assert not emit.found
