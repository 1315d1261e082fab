"""A sample of rows: chosen alike everywhere, read as all rows are, with its error."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from weakref import finalize

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import equipoise
from equipoise.anatomy import calls
from equipoise.anatomy.call_stack import Caller
from equipoise.anatomy.calls import PIECE_ELEMENTS, AttentionCall, Where
from equipoise.anatomy.fused_kernels import kernel_call
from equipoise.errors import InputError
from equipoise.numerics.token_statistics import nan_quantiles
from equipoise.probes import attention
from equipoise.probes.attention import (
    QUANTILES,
    AttentionRows,
    _kappa_parts,
    rows_of_call,
    width_at,
)
from equipoise.probes.capture import Collector
from equipoise.probes.row_sample import (
    chosen_queries,
    query_weights,
    sampling_errors,
    weighted_mean,
    weighted_quantiles,
)
from equipoise.watching.options import WatchOptions
from equipoise.watching.ranks.merge import join_tables
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


def by_kernel(**how: object) -> AttentionCall:
    """The same queries and keys, as a fused kernel is given them."""
    call = given()
    assert call.q_BHQD is not None and call.k_BGKD is not None
    q, k = call.q_BHQD.transpose(1, 2), call.k_BGKD.transpose(1, 2)
    real = how.pop("real_BK", None)
    return kernel_call(Caller(), {"q": q, "k": k, "v": k, **how}, real_BK=real)  # type: ignore[arg-type]


def packed(lengths: list[int], longest: int) -> AttentionCall:
    """300 tokens in documents; a few at the end belong to none."""
    q, k = drawn(300, 4, 8), drawn(300, 2, 8, seed=1)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    given = {"starts_q": starts, "starts_k": starts, "causal": True, "left": 30}
    given |= {"longest_q": longest, "longest_k": longest}
    return kernel_call(Caller(), {"q": q, "k": k, "v": k, **given})


def by_flex() -> AttentionCall:
    added = drawn(2, 4, QUERIES, QUERIES, seed=3)

    def modify(scores: Tensor, at: Where, i_q: Tensor) -> Tensor:
        return scores + added[at.sequences, at.heads][:, :, i_q]

    return given(modify=modify)


KERNELS: dict[str, Callable[[], AttentionCall]] = {
    "window": lambda: by_kernel(causal=True, left=20),
    "ALiBi": lambda: by_kernel(causal=True, slopes=torch.rand(2, 4)),
    "soft-cap": lambda: by_kernel(softcap=2.0, right=40),
    "sinks": lambda: by_kernel(causal=True, sinks=torch.tensor([0.5, -1.0, 0.0, 2.0])),
    "padding left": lambda: by_kernel(
        causal=True, left=20, real_BK=torch.arange(QUERIES) >= torch.tensor([[9], [0]])
    ),
    "pack, padded": lambda: packed([149, 131], 150),
    "pack, one sequence": lambda: packed([200, *[7] * 12], 200),
}
CALLS: dict[str, Callable[[], AttentionCall]] = {
    **KERNELS,
    "flex": by_flex,
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
    assert chosen[:8].tolist() == list(range(8))  # the first eighth, always
    edges = 8 + np.arange(57) * 992 // 56
    assert (np.digitize(chosen[8:].numpy(), edges) == np.arange(1, 57)).all()
    weights = query_weights(1000, 64).numpy()
    assert (weights == np.concatenate([np.ones(8), np.diff(edges)])).all()
    assert torch.equal(chosen, chosen_queries(1000, 64, step=7, site="layer.1"))
    for other in ({"step": 8, "site": "layer.1"}, {"step": 7, "site": "layer.2"}):
        assert not torch.equal(chosen, chosen_queries(1000, 64, **other))  # type: ignore[arg-type]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


def test_every_query_of_a_part_is_as_likely() -> None:
    counts = np.zeros(36)
    for step in range(2000):
        counts[chosen_queries(36, 8, step=step, site="s").numpy()] += 1
    assert counts[0] == 2000
    # 2,000 draws of 5: 400 each, 18 off in two thirds of all cases.
    assert abs(counts[1:] - 400).max() < 5 * 18


@pytest.mark.parametrize("kind", CALLS)
def test_chosen_rows_read_as_all_rows_do(kind: str) -> None:
    call = CALLS[kind]()
    B, _, Q, _ = call.shape
    chosen = chosen_queries(Q, 40, step=0, site="s")
    some, every = rows_of_call(call, chosen), rows_of_call(call, None)
    for name in every.__slots__:
        all_HBQ = getattr(every, name).unflatten(1, (B, Q))
        expected = all_HBQ[:, :, chosen].flatten(1)
        # Products of other block shapes round differently; θ closes within 1e-6. A row
        # without keys has a sink of NaN: it does not count.
        close = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
        torch.testing.assert_close(getattr(some, name), expected, **close)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CALLS)
def test_the_largest_logit_of_some_rows_has_a_name_of_its_own(kind: str) -> None:
    call = CALLS[kind]()
    B, _, Q, _ = call.shape
    some, every = emitted(call, 40), emitted(call, "all")
    rows, chosen = rows_of_call(call, None), chosen_queries(Q, 40, step=3, site="site")
    counted = rows.counted & call.counted_BQ().flatten()
    logits = rows.max_logit.where(counted, -torch.inf).unflatten(1, (B, Q))
    found = some["site", "attention.max_logit.sampled"]
    expected = logits[:, :, chosen].amax((1, 2))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert bool((found <= every["site", "attention.max_logit"] + 1e-5).all())
    names = {name for _, name in some.keys() - every.keys()}
    errors = {f"attention.theta.{x}.error" for x in ("mean", "p5", "p50")}
    assert names == errors | {"attention.max_logit.sampled"}
    assert every.keys() - some.keys() == {("site", "attention.max_logit")}


@pytest.mark.parametrize("kind", KERNELS)
def test_places_tell_what_the_scores_would(kind: str) -> None:
    call = KERNELS[kind]()
    looked = replace(call, by_place=None)
    real_BQ = looked.counted_BQ()
    assert torch.equal(call.counted_BQ(), real_BQ)
    placed, seen = call.first_key_BQ(), looked.first_key_BQ()
    assert placed is not None and seen is not None
    assert torch.equal(placed[real_BQ], seen[real_BQ])


@pytest.mark.parametrize("kind", KERNELS)
def test_pieces_of_a_kernels_call_are_its_scores(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads and sequences one by one: slopes, sinks and offsets are those of each."""
    monkeypatch.setattr(calls, "PIECE_ELEMENTS", 1)
    monkeypatch.setattr(calls, "PIECE_QUERIES", 50)
    call = KERNELS[kind]()
    whole = call.scores(slice(0, call.shape[2]))
    read = torch.full_like(whole, torch.nan)
    for where, piece in call.pieces():
        read[where] = piece
    torch.testing.assert_close(read, whole)


@pytest.mark.parametrize("kind", ["causal", *KERNELS])
def test_a_sample_forms_only_its_own_scores(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed: list[int] = []
    raw = AttentionCall._raw

    def counting(self: AttentionCall, *args: object) -> Tensor:
        scores = raw(self, *args)  # type: ignore[arg-type]
        formed.append(scores.numel())
        return scores

    monkeypatch.setattr(AttentionCall, "_raw", counting)
    call = CALLS[kind]()
    emitted(call, 40)
    B, H, _, K = call.shape
    assert sum(formed) <= B * H * 40 * K


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {_storage(x) for x in tree_leaves((args, kwargs))}
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            key = _storage(x)
            if key is not None and key not in given | self.known:
                self._take(key, x.untyped_storage())
        return out

    def _take(self, key: int, storage: torch.UntypedStorage) -> None:
        def gone(size: int) -> None:
            self.now -= size
            self.known.discard(key)

        self.known.add(key)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        finalize(storage, gone, storage.nbytes())


def _storage(x: object) -> int | None:
    return x.untyped_storage()._cdata if isinstance(x, Tensor) else None


def room(length: int) -> int:
    """The most bytes that reading a call of 8 heads allocates at once."""
    qkv = drawn(1, length, 3, 8, 64)
    q, k, _ = (x.transpose(1, 2) for x in qkv.unbind(2))
    call = AttentionCall(module=None, kind="sdpa", q_BHQD=q, k_BGKD=k, causal=True)
    with Allocated() as counted:
        emitted(call, 128)
    return counted.most


def test_a_sample_needs_room_for_tiles_and_not_for_scores() -> None:
    """Buffers of a piece before and now, what masks it, and one head's keys in order.

    All scores of one head of 8,192 tokens are 256 MiB.
    """
    tile = 4 * PIECE_ELEMENTS
    short, long = room(2048), room(8192)
    assert long <= 3 * tile
    one_heads_keys = 4 * 64 * (8192 - 2048)
    assert long - short <= one_heads_keys + tile / 4


def test_short_calls_are_read_whole() -> None:
    call = given(causal=True)
    for other in (emitted(call, QUERIES), emitted(call, "all", step=9)):
        for key, value in emitted(call, "all").items():
            assert torch.equal(other[key], value)


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
    held, weights = dict.fromkeys(truth, 0.0), query_weights(1200, 150)
    for step in range(200):
        chosen = chosen_queries(1200, 150, step=step, site="s")
        read = theta_HBQ[:, :, chosen]
        errors = sampling_errors(read, weights, at=LEVELS)
        flat_HN, weight_N = read.flatten(1), weights.repeat(read.shape[1])
        found = {"mean": weighted_mean(flat_HN, weight_N)}
        values = weighted_quantiles(flat_HN, weight_N, list(LEVELS.values()))
        found |= dict(zip(LEVELS, values, strict=True))
        for name in truth:
            inside = (found[name] - truth[name]).abs() <= errors[name]
            held[name] += float(inside.float().mean()) / 200
    # 400 intervals of 95 %: 1.1 % off in two thirds of all cases; see the benchmark.
    for name, share in held.items():
        assert 0.9 <= share <= 0.995, (name, share)


def test_weights_repeat_rows() -> None:
    """A row of weight w reads as w rows alike; of weight 1, as itself."""
    theta, weights = trend(queries=90).flatten(1), torch.ones(270)
    at = [0.0, 0.05, 0.37, 0.5, 1.0]
    expected = nan_quantiles(theta, at)
    torch.testing.assert_close(weighted_quantiles(theta, weights, at), expected)
    torch.testing.assert_close(weighted_mean(theta, weights), theta.nanmean(1))
    weights = 1.0 + torch.arange(270) % 4
    many = theta.repeat_interleave(weights.long(), 1)
    torch.testing.assert_close(weighted_mean(theta, weights), many.nanmean(1))
    found, steps = weighted_quantiles(theta, weights, at), nan_quantiles(many, at)
    # Between the middles of two runs of equal rows one value passes into the next.
    assert float((found - steps).abs().max()) < float(
        theta.sort(1).values.diff(dim=1).nan_to_num().amax()
    )
    assert (
        weighted_quantiles(torch.full((2, 3), torch.nan), weights[:3], at).isnan().all()
    )


def test_rows_that_were_all_read_have_no_error_and_weights_count_rows() -> None:
    errors = sampling_errors(trend(queries=90), torch.ones(90), at={})
    # Nothing but what θ itself is known to.
    assert errors["mean"].tolist() == pytest.approx([1e-6, 1e-6])
    rows, weight_N = rows_of_call(given(), None), torch.full((300,), 2.0)
    real_HN = torch.ones(4, 300, dtype=torch.bool)
    once_3H = _kappa_parts(rows, real_HN, None)
    twice_3H = _kappa_parts(rows, real_HN, weight_N)
    torch.testing.assert_close(twice_3H[1:], 2 * once_3H[1:])
    assert torch.equal(twice_3H[0], once_3H[0])


def test_a_few_first_rows_do_not_decide_the_mean() -> None:
    """θ differs only where few keys are visible: those rows are always read."""
    theta = torch.ones(1, 1, 2048) - 0.9 * torch.exp(-torch.arange(2048) / 6)
    truth, weights = float(theta.mean()), query_weights(2048, 512)
    for step in range(40):
        read = theta[..., chosen_queries(2048, 512, step=step, site="s")]
        found = float(weighted_mean(read[0], weights)[0])
        error = float(sampling_errors(read, weights, at={})["mean"][0])
        assert abs(found - truth) <= error + 1e-6


def test_rare_rows_that_a_sample_misses_are_within_the_error_of_the_mean() -> None:
    """Three of 2048 rows are saturated; two samples in five see none of them."""
    theta = torch.ones(1, 1, 2048)
    theta[..., [700, 1200, 1900]] = 0.1
    weights, held, missed = query_weights(2048, 512), 0.0, 0
    for step in range(100):
        read = theta[..., chosen_queries(2048, 512, step=step, site="s")]
        off = float(weighted_mean(read[0], weights)[0]) - float(theta.mean())
        error = float(sampling_errors(read, weights, at={})["mean"][0])
        held, missed = held + (abs(off) <= error), missed + bool((read == 1).all())
    assert missed > 20 and held >= 90


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


def _theta(call: AttentionCall) -> Tensor:
    rows = rows_of_call(call, chosen_queries(QUERIES, 40, step=3, site="site"))
    return rows.theta_lower.where(rows.counted, torch.nan)


def test_two_ranks_read_the_rows_of_one_process() -> None:
    """Each has one of two sequences; together the mean, κ and quantiles of both."""
    call = given(causal=True)
    assert call.q_BHQD is not None and call.k_BGKD is not None
    tables, parts = [], []
    for rank in (0, 1):
        probe, emit = AttentionRows(ranks=2, rows=40), Collector()
        probe.begin_step(3)
        mine = slice(rank, rank + 1)
        half = replace(call, q_BHQD=call.q_BHQD[mine], k_BGKD=call.k_BGKD[mine])
        probe.on_attention("site", half, emit)
        tables.append(emit.pop())
        parts.append(probe.parts())
    together, shared, one = join_tables(tables), Emitter(), emitted(call, 40)
    probe.on_parts(parts, shared)
    for name in ("theta.mean", "entropy", "sink", "max_logit.sampled", "theta.p0"):
        found = together[f"attention.{name}"]["site"].values
        expected = one["site", f"attention.{name}"].tolist()
        assert found == pytest.approx(expected, rel=1e-5), name
    # Where one row stands for four, bins of all ranks step and one process is linear
    # between: they agree within one row's weight.
    for name, level in LEVELS.items():
        found = together[f"attention.theta.{name}"]["site"].values
        near = [level - 4 / 300, level + 4 / 300]
        low, high = weighted_quantiles(
            _theta(call), query_weights(150, 40).repeat(2), near
        )
        for value, least, most in zip(found, low.tolist(), high.tolist(), strict=True):
            assert least - width_at(least) <= value <= most + width_at(most)
    kappa = shared.found["site", "precision.kappa_softmax"]
    torch.testing.assert_close(kappa, one["site", "precision.kappa_softmax"])


def test_a_resumed_run_reads_the_same_rows(tmp_path: Path) -> None:
    def trained(run: Path, stops: list[int]) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        state: dict[str, object] = {}
        begin = 0
        for stop in stops:
            model = gpt(context=40)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model.load_state_dict(weights or model.state_dict())
            handle = equipoise.watch(
                model, optimizer, run=run, every=2, rows=16, quiet=True
            )
            if state:
                handle.load_state_dict(state)
            for step in range(begin, stop):
                model(tokens(seed=step, length=40)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            state, begin = handle.state_dict(), stop
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            handle.close()
        return weights

    through, resumed = tmp_path / "a.eqp", tmp_path / "b.eqp"
    one, two = trained(through, [6]), trained(resumed, [3, 6])
    assert all(torch.equal(one[name], two[name]) for name in one)
    for quantity in ("attention.theta.mean", "attention.theta.p5.error"):
        a, b = (equipoise.open_run(p).series(quantity) for p in (through, resumed))
        assert a.keys() == b.keys() and a
        for site, (steps, values) in a.items():
            assert list(steps) == [0, 2, 4] == list(b[site][0])
            np.testing.assert_array_equal(values, b[site][1])


@pytest.mark.parametrize("rows", [0, 15, True, "most", 20.5])
def test_a_sample_is_of_a_number_of_rows(rows: object) -> None:
    with pytest.raises(InputError, match="rows="):
        WatchOptions(rows=rows)  # type: ignore[arg-type]
