"""A sample of rows: chosen alike everywhere, read as all rows are, with its error."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import equipoise
from equipoise.anatomy.calls import AttentionCall
from equipoise.errors import InputError
from equipoise.probes import attention
from equipoise.probes.attention import QUANTILES, AttentionRows, _rows
from equipoise.probes.row_sample import chosen_queries, sampling_errors
from equipoise.watching.options import WatchOptions
from tests.probes.reading import Emitted, Emitter, gpt, tokens

QUERIES = 150
LEVELS = {name: QUANTILES[name] for name in ("p5", "p50")}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def given(**changes: object) -> AttentionCall:
    q, k = drawn(2, 4, QUERIES, 8), drawn(2, 2, QUERIES, 8, seed=1)
    call = AttentionCall(module=None, kind="sdpa", q_BHQD=q, k_BGKD=k)
    return replace(call, **changes)  # type: ignore[arg-type]


def shown() -> Tensor:
    """A mask that hides the last tokens of one sequence, and some keys of all."""
    seen = drawn(2, 1, QUERIES, QUERIES, seed=2) < 1
    seen[1, :, :, -20:] = False
    return seen


CALLS: dict[str, Callable[[], AttentionCall]] = {
    "plain": given,
    "causal": lambda: given(causal=True),
    "causal and mask": lambda: given(causal=True, mask=shown()),
    "mask": lambda: given(mask=shown()),
    "added": lambda: given(mask=torch.zeros(1).where(shown(), -torch.inf)),
    "one row of mask": lambda: given(mask=shown()[:, :, :1]),
    "scores": lambda: given(
        q_BHQD=None, k_BGKD=None, scores_BHQK=drawn(2, 4, QUERIES, QUERIES)
    ),
}


def emitted(call: AttentionCall, rows: object, step: int = 3) -> Emitted:
    probe, emit = AttentionRows(rows=rows), Emitter()  # type: ignore[arg-type]
    probe.begin_step(step)
    probe.on_attention("site", call, emit)
    return emit.found


def test_one_query_of_each_part_is_chosen_again_and_again() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    chosen = chosen_queries(1000, 64, step=7, site="layer.1")
    edges = np.arange(65) * 1000 // 64
    assert (np.digitize(chosen.numpy(), edges) == np.arange(1, 65)).all()
    assert torch.equal(chosen, chosen_queries(1000, 64, step=7, site="layer.1"))
    for other in ({"step": 8, "site": "layer.1"}, {"step": 7, "site": "layer.2"}):
        assert not torch.equal(chosen, chosen_queries(1000, 64, **other))  # type: ignore[arg-type]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


def test_every_query_of_a_part_is_as_likely() -> None:
    counts = np.zeros(40)
    for step in range(2000):
        counts[chosen_queries(40, 8, step=step, site="s").numpy()] += 1
    # 2,000 draws of 5: 400 each, 18 off in two thirds of all cases.
    assert abs(counts - 400).max() < 5 * 18


@pytest.mark.parametrize("kind", CALLS)
def test_chosen_rows_read_as_all_rows_do(kind: str) -> None:
    call = CALLS[kind]()
    chosen = chosen_queries(QUERIES, 40, step=0, site="s")
    some, every = _rows(call, chosen), _rows(call, None)
    for name in every.__slots__:
        all_HBQ = getattr(every, name).unflatten(1, (2, QUERIES))
        expected = all_HBQ[:, :, chosen].flatten(1)
        # Products of other block shapes round differently; θ closes within 1e-6.
        torch.testing.assert_close(getattr(some, name), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CALLS)
def test_the_largest_logit_is_of_all_rows(kind: str) -> None:
    call = CALLS[kind]()
    some, every = emitted(call, 40), emitted(call, "all")
    key = ("site", "attention.max_logit")
    torch.testing.assert_close(some[key], every[key], rtol=1e-5, atol=1e-6)
    names = {name for _, name in some.keys() - every.keys()}
    assert names == {f"attention.theta.{x}.error" for x in ("mean", "p5", "p50")}


def test_short_calls_and_scores_in_order_are_read_whole() -> None:
    call = given(causal=True)
    for other in (emitted(call, QUERIES), emitted(call, "all", step=9)):
        for key, value in emitted(call, "all").items():
            assert torch.equal(other[key], value)
    changed = given(modify=lambda scores, _: scores)
    assert emitted(changed, 40).keys() == emitted(changed, "all").keys()


def trend(heads: int = 2, sequences: int = 3, queries: int = 1200) -> Tensor:
    """θ that grows along the sequence, with noise, and rows that do not count."""
    place = torch.linspace(0.2, 0.8, queries)
    theta = place + 0.1 * drawn(heads, sequences, queries, seed=4)
    return theta.masked_fill(torch.arange(queries) < 10, torch.nan)


def test_intervals_hold_what_all_rows_give() -> None:
    theta_HBQ = trend()
    flat = theta_HBQ.flatten(1)
    truth = {"mean": flat.nanmean(1)}
    truth |= {name: flat.nanquantile(q, 1) for name, q in LEVELS.items()}
    held = dict.fromkeys(truth, 0.0)
    for step in range(200):
        chosen = chosen_queries(1200, 150, step=step, site="s")
        read = theta_HBQ[:, :, chosen]
        errors = sampling_errors(read, queries=1200, at=LEVELS)
        found = {"mean": read.flatten(1).nanmean(1)}
        found |= {n: read.flatten(1).nanquantile(q, 1) for n, q in LEVELS.items()}
        for name in truth:
            inside = (found[name] - truth[name]).abs() <= errors[name]
            held[name] += float(inside.float().mean()) / 200
    # 400 intervals of 95 %: 1.1 % off in two thirds of all cases; see the benchmark.
    for name, share in held.items():
        assert 0.9 <= share <= 0.995, (name, share)


def test_training_does_not_change_and_the_step_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def chosen(queries: int, rows: int, *, step: int, site: str) -> Tensor:
        steps.append(step)
        return chosen_queries(queries, rows, step=step, site=site)

    monkeypatch.setattr(attention, "chosen_queries", chosen)
    weights = []
    for watched in (False, True):
        model = gpt(context=40, dropout=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = None
        if watched:
            handle = equipoise.watch(
                model, optimizer, run=tmp_path / "run.eqp", every=2, rows=16, quiet=True
            )
        torch.manual_seed(5)
        for _ in range(5):
            model(tokens(length=40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.close()
        weights.append([*model.parameters(), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert sorted(set(steps)) == [0, 2, 4]
    run = equipoise.open_run(tmp_path / "run.eqp")
    assert len(run.series("attention.theta.p5.error")) == len(model.blocks)


@pytest.mark.parametrize("rows", [0, 15, True, "most", 20.5])
def test_a_sample_is_of_a_number_of_rows(rows: object) -> None:
    with pytest.raises(InputError, match="rows="):
        WatchOptions(rows=rows)  # type: ignore[arg-type]
