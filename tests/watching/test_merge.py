"""Several ranks measure one step: what the merged reading must be."""

import math

import pytest
import torch
from torch import Tensor

from equipoise.anatomy.sharding import WHOLE, Split
from equipoise.probes.attention import HISTOGRAM, QUANTILES, theta_histogram, width_at
from equipoise.probes.capture import Collector, SiteValues, Table
from equipoise.probes.protocols import How
from equipoise.probes.sharding import Shard, parts_by_rank
from equipoise.records import Finding
from equipoise.watching.findings import probe_failed
from equipoise.watching.ranks.group import GroupRanks
from equipoise.watching.ranks.merge import (
    RankSample,
    add_shared,
    cleared_by_rank,
    disagreement,
    join_tables,
    merge_messages,
    steps_by_rank,
)
from equipoise.watching.step.readings import NORM, NORM_PART

SITE = "blocks.0.attention"


def measured(theta_HN: Tensor, *, first: int = 0) -> Table:
    """What a rank says of its rows, as the attention probe says it."""
    emit = Collector()
    for name, q in QUANTILES.items():
        how = {"p0": "min", "p100": "max"}.get(name, "last")
        found = torch.nanquantile(theta_HN, q, dim=-1)
        emit(SITE, f"attention.theta.{name}", found, how=how)  # type: ignore[arg-type]
    emit(SITE, "attention.theta.mean", theta_HN.nanmean(-1), how="mean")
    emit(SITE, HISTOGRAM, theta_histogram(theta_HN), how="sum")
    emit(SITE, "attention.B", theta_HN.nansum(), how="max")
    return emit.send({SITE: first}).table()


def rows(*shape: int, seed: int, power: float) -> Tensor:
    """θ of some rows: near 1 for small powers, near 0 for large ones."""
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=rng) ** power


@pytest.mark.parametrize("powers", [(0.01, 3.0), (1.0, 1.0), (20.0, 0.3), (1e-4, 1e-4)])
def test_quantiles_are_of_all_ranks_rows(powers: tuple[float, float]) -> None:
    one, two = (rows(2, 300 + 500 * i, seed=i, power=p) for i, p in enumerate(powers))
    table = join_tables([measured(one), measured(two)])
    for name, q in QUANTILES.items():
        truth_H = torch.quantile(torch.cat([one, two], 1), q, dim=-1).tolist()
        found_H = table[f"attention.theta.{name}"][SITE].values
        for found, truth in zip(found_H, truth_H, strict=True):
            exact = q in (0, 1)
            assert abs(found - truth) <= (1e-7 if exact else width_at(truth) + 1e-7)
    assert HISTOGRAM not in table


def test_a_mean_is_over_rows_not_over_ranks() -> None:
    one, two = rows(2, 10, seed=0, power=1.0), rows(2, 90, seed=1, power=5.0)
    nothing = torch.full((2, 40), torch.nan)
    table = join_tables([measured(one), measured(two), measured(nothing)])
    truth = torch.cat([one, two], 1).mean(-1)
    found = torch.tensor(table["attention.theta.mean"][SITE].values)
    torch.testing.assert_close(found, truth)
    alone = join_tables([measured(nothing), measured(nothing)])
    assert all(map(math.isnan, alone["attention.theta.mean"][SITE].values))
    assert all(map(math.isnan, alone["attention.theta.p50"][SITE].values))


def test_heads_of_tensor_parallel_ranks_stand_side_by_side() -> None:
    """Two by two ranks: each pair shares heads, and the pairs hold different heads."""
    theta = rows(4, 200, seed=3, power=2.0)
    parts = [
        measured(theta[head : head + 2, start : start + 100], first=head)
        for start in (0, 100)
        for head in (2, 0)
    ]
    table = join_tables(parts)
    truth = torch.quantile(theta, 0.05, dim=-1).tolist()
    found = table["attention.theta.p5"][SITE].values
    assert all(abs(a - b) <= width_at(b) for a, b in zip(found, truth, strict=True))
    assert table["attention.theta.p100"][SITE].values == tuple(theta.amax(-1).tolist())
    assert len(table["attention.B"][SITE].values) == 1


def test_a_rank_alone_with_its_heads_keeps_the_exact_quantile() -> None:
    theta = rows(4, 50, seed=4, power=2.0)
    table = join_tables([measured(theta[:2]), measured(theta[2:], first=2)])
    exact = torch.nanquantile(theta, 0.05, dim=-1).tolist()
    assert table["attention.theta.p5"][SITE].values == tuple(exact)


def test_head_numbers_survive_packing() -> None:
    sent = RankSample(table={"q": {SITE: SiteValues((1.0, 2.0), "mean", 6)}})
    message = RankSample.from_bytes(sent.to_bytes())
    assert message.table == sent.table
    other = RankSample(table={"q": {SITE: SiteValues((8.0, 9.0), "mean", 0)}})
    whole = merge_messages([message, other]).table["q"][SITE]
    assert whole.values == (8.0, 9.0, 1.0, 2.0)


def part(value: float, index: int, parts: int = 2) -> dict[str, Shard]:
    return {"x": Shard(torch.tensor([value]), Split(index, parts))}


def test_parts_of_one_copy_belong_together() -> None:
    """Two copies of two parts each, in either order of the mesh."""
    for ranks in ([(1, 0), (2, 1), (3, 0), (4, 1)], [(1, 0), (3, 0), (2, 1), (4, 1)]):
        found = parts_by_rank([part(float(v), i) for v, i in ranks], "x")
        assert [[float(x) for x in copy] for copy in found] == [[1, 2], [3, 4]]


def test_incomplete_parts_make_no_copy() -> None:
    assert parts_by_rank([part(1.0, 0), {}], "x") == []
    assert parts_by_rank([part(1.0, 0), part(2.0, 1, parts=3)], "x") == []
    assert len(parts_by_rank([part(1.0, 0), part(2.0, 1), part(3.0, 0)], "x")) == 1


def test_parts_survive_packing() -> None:
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    parts = {
        "gain": {"s|q": Shard(values, Split(1, 2)), "s|k": Shard(values[0, 0], WHOLE)}
    }
    sent = RankSample(
        table={"q": {SITE: SiteValues((1.0, 2.0), "mean", 6)}}, parts=parts
    )
    found = RankSample.from_bytes(sent.to_bytes())
    assert found.table == sent.table and found.parts.keys() == parts.keys()
    for name, kept in parts["gain"].items():
        assert torch.equal(found.parts["gain"][name].values, kept.values)
        assert found.parts["gain"][name].split == kept.split


def test_a_norm_has_parts_that_add_up_in_squares_and_a_sum() -> None:
    table = {"gradient.norm": {SITE: SiteValues((3.0,), "norm")}}
    shared = {
        "gradient.norm": {SITE: SiteValues((4.0,), "norm")},
        "G": {"s": SiteValues((2.0,), "last")},
    }
    whole = add_shared(table, shared)
    assert whole["gradient.norm"][SITE].values == (5.0,)
    assert whole["G"]["s"].values == (2.0,)
    assert add_shared(whole, {"G": {"s": SiteValues((7.0,), "last")}})["G"][
        "s"
    ].values == (7.0,)


@pytest.mark.parametrize("how", ["max", "min"])
@pytest.mark.parametrize("order", [1, -1])
def test_what_is_broken_on_one_rank_is_broken(how: How, order: int) -> None:
    tables = [{"q": {SITE: SiteValues((x, 1.0), how)}} for x in (2.0, math.nan)][
        ::order
    ]
    first, second = join_tables(tables)["q"][SITE].values
    assert math.isnan(first) and second == 1.0


def test_of_scalars_the_loss_is_a_mean_and_the_norm_whole() -> None:
    names = "loss", NORM_PART, "learning_rate"
    values = (2.0, 3.0, 0.1), (4.0, 4.0, 0.2)
    ranks = [
        RankSample(scalars=[(7, name, x) for name, x in zip(names, some, strict=True)])
        for some in values
    ]
    found = {name: x for _, name, x in merge_messages(ranks).scalars}
    assert found == {"loss": 3.0, NORM: 5.0, "learning_rate": 0.1}


@pytest.mark.parametrize("order", [1, -1])
def test_of_one_nan_the_rank_nearest_its_origin_counts(order: int) -> None:
    seen = (6, "update"), (5, "forward"), (5, "backward")
    found = [
        Finding(step=step, severity="error", code=f"nonfinite.{where}", message="NaN")
        for step, where in seen[::order]
    ]
    (one,) = merge_messages([RankSample(findings=[each]) for each in found]).findings
    assert (one.step, one.code) == (5, "nonfinite.forward")


def test_two_probes_that_fail_in_one_step_are_two_findings() -> None:
    here, there = (
        [probe_failed(3, name, ValueError(rank)) for name in ("gain", "logits")]
        for rank in range(2)
    )
    merged = merge_messages([RankSample(findings=here), RankSample(findings=there)])
    assert merged.findings == here


def test_the_slowest_rank_sets_the_interval() -> None:
    """All ranks wait for the one that measures longest and trains fastest."""
    messages = [
        RankSample(cost=c, plain=p) for c, p in ((1.0, 4.0), (3.0, 5.0), (2.0, 6.0))
    ]
    merged = merge_messages(messages)
    assert (merged.cost, merged.plain) == (3.0, 4.0)


def test_ranks_that_hold_different_weights_disagree() -> None:
    def table(norm: float, first: int = 0) -> Table:
        return {"projection.norm.Q": {"a": SiteValues((norm,), "last", first)}}

    found = disagreement([table(2.0), table(1.9), table(2.0)])
    assert found["ranks.disagreement"][""].values == pytest.approx((0.05,))
    equal = disagreement([table(2.0), table(2.0)])
    assert equal["ranks.disagreement"][""].values == (0.0,)
    assert disagreement([table(2.0, first=0), table(1.0, first=4)]) == {}


def test_where_each_rank_is_travels_with_its_message() -> None:
    packed = [RankSample(step=k, cleared=2).to_bytes() for k in (7, 7, 8)]
    messages = [RankSample.from_bytes(one) for one in packed]
    assert steps_by_rank(messages) == "rank 0: 7, rank 1: 7, rank 2: 8"
    assert steps_by_rank(messages[:2]) == cleared_by_rank(messages) == ""


@pytest.mark.parametrize("room", [-1, 0, 1, 7, 8, 9])
def test_a_message_fits_with_its_size_in_front_or_is_sent_again(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_gather(out: list[Tensor], buffer: Tensor, group: object) -> None:
        out[0].copy_(buffer)

    monkeypatch.setattr("torch.distributed.all_gather", all_gather)
    ranks = GroupRanks.__new__(GroupRanks)  # without a process group
    message = RankSample(scalars=[(3, "loss", 2.5)], step=3)
    ranks.count, ranks.collectives, ranks._group = 1, 0, None  # type: ignore[assignment]
    ranks._capacity = len(message.to_bytes()) + room
    first = ranks.exchange(message)
    assert len(first) == (room >= 8), "eight bytes say how long it is"
    (found,) = first or ranks.exchange(message)
    assert found == message
