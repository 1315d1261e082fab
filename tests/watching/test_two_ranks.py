"""Two ranks: the bits of the unwatched, the truth of one process, one verdict."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import equipoise
from equipoise.probes.attention import HISTOGRAM, width_at
from tests.watching.single_process import (
    Whole,
    assert_norms,
    assert_readings,
    run_ranks,
    trained_whole,
)
from tests.watching.tensor_parallel import Llama
from tests.watching.two_ranks import STEPS, without_batch_norm
from tests.watching.wide_model import RATE, wide

Results = tuple[Path, list[dict[str, Any]]]
PENDING = [
    *("learning_rate", "optimizer.weight_decay", "optimizer.momentum", "loss"),
]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("group")
    return folder, run_ranks("tests.watching.two_ranks", folder, ranks=2)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> equipoise.Run:
    """One process that sees both halves of every batch."""
    run = tmp_path_factory.mktemp("truth") / "one.eqp"
    return trained_whole(without_batch_norm(), run, clip=True).run


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_two_ranks_train_bit_identically(group: Results, kind: str) -> None:
    """Twenty steps: losses, gradients, evaluations, weights, optimiser and RNG."""
    for rank in group[1]:
        assert rank[f"{kind}.alone"]["bits"] == rank[f"{kind}.watched"]["bits"]
        assert rank[f"{kind}.watched"]["collectives"] == 7
    run = equipoise.open_run(group[0] / f"{kind}-bits.eqp")
    assert list(run.series("loss")[""][0]) == list(range(20))


NORMS = ["gradient.norm", "gradient.norm.total", "projection.G", "projection.norm.q"]
NORMS += ["output.logit_norm", "precision.kappa_softmax", "update.norm"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("quantity", [*NORMS, "residual.B", "attention.max_logit"])
def test_values_are_those_of_one_process(
    group: Results, truth: equipoise.Run, kind: str, quantity: str
) -> None:
    run = equipoise.open_run(group[0] / f"{kind}.eqp")
    expected, found = truth.series(quantity), run.series(quantity)
    assert expected.keys() == found.keys()
    for site, (steps, values) in expected.items():
        assert list(found[site][0]) == list(steps)
        torch.testing.assert_close(
            torch.tensor(found[site][1]), torch.tensor(values), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["p0", "p5", "p50", "p100", "mean"])
def test_theta_is_of_all_ranks_rows(
    group: Results, truth: equipoise.Run, kind: str, name: str
) -> None:
    """Between the ends to a bin of the histograms that the ranks exchange."""
    quantity = f"attention.theta.{name}"
    run = equipoise.open_run(group[0] / f"{kind}.eqp")
    for site, (_, expected) in truth.series(quantity).items():
        found = run.series(quantity)[site][1]
        pairs = zip(found.flatten().tolist(), expected.flatten().tolist(), strict=True)
        for ours, theirs in pairs:
            inner = width_at(theirs) if name in ("p5", "p50") else 0.0
            assert abs(ours - theirs) <= inner + 1e-5
    assert HISTOGRAM not in run.quantities


def test_the_loss_is_the_groups(group: Results, truth: equipoise.Run) -> None:
    _, expected = truth.series("loss")[""]
    steps, found = equipoise.open_run(group[0] / "ddp.eqp").series("loss")[""]
    assert list(steps) == list(range(STEPS))
    # A mean of two halves' means: fp32 rounds the sums apart.
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_collective_per_sampled_step(group: Results, kind: str) -> None:
    assert all(rank[f"{kind}.truth"]["collectives"] == 3 for rank in group[1])


@pytest.mark.parametrize("bad", [0, 1])
def test_a_nan_on_either_rank_is_the_same_finding_on_both(
    group: Results, bad: int
) -> None:
    first, second = (rank[f"poison.{bad}"]["findings"] for rank in group[1])
    assert first == second
    (found,) = passes(first)
    assert (found.step, found.code) == (1, "nonfinite.forward")
    assert found.params["rank"] == bad and found.params["kind"] == "NaN"
    written = equipoise.open_run(group[0] / f"poison-{bad}.eqp").findings
    assert written == [*map(equipoise.Finding.from_json, first)]


def passes(findings: list[str]) -> list[equipoise.Finding]:
    """Return the findings of a pass that is not finite; checks name what it leaves."""
    every = map(equipoise.Finding.from_json, findings)
    return [found for found in every if found.belongs_to("nonfinite")]


def readings(path: Path) -> dict[str, Any]:
    run = equipoise.open_run(path)
    return {
        f"{quantity} {site}": (steps.tolist(), values.tolist())
        for quantity in run.quantities
        for site, (steps, values) in run.series(quantity).items()
    }


def test_devices_exchange_a_sample_when_the_next_step_ends(group: Results) -> None:
    """What is written is the same; parts come with the readings, in one copy."""
    assert readings(group[0] / "late.eqp") == readings(group[0] / "ddp.eqp")
    for rank in group[1]:
        assert rank["late"]["collectives"] == 3
        # And what the ranks' parts make, which is on the host: there is one kind here.
        assert rank["late"]["copies"] == 2 * 3


def test_a_sample_that_was_not_exchanged_is_that_of_one_rank(group: Results) -> None:
    """No rank may ask the others by itself: a verdict is that of the last exchange."""
    first, second = (rank["ended"] for rank in group[1])
    assert first["asked"] and first["pending"] == second["pending"] == PENDING
    run = equipoise.open_run(group[0] / "ended.eqp")
    whole = equipoise.open_run(group[0] / "ddp.eqp")
    assert HISTOGRAM not in run.quantities
    for quantity in ("loss", "attention.theta.mean", "projection.G"):
        assert {site: list(s) for site, (s, _) in run.series(quantity).items()} == {
            site: [0] for site in whole.series(quantity)
        }
    assert [(f.step, f.code) for f in run.findings] == [(0, "watch.rank_lost")]
    assert run.findings[0].params["case"] == "not_shared"


def test_a_message_that_does_not_fit_is_sent_at_the_next_step(group: Results) -> None:
    steps, _ = equipoise.open_run(group[0] / "small.eqp").series("gradient.norm")[
        "head"
    ]
    assert list(steps) == [1, 3]
    losses = equipoise.open_run(group[0] / "small.eqp").series("loss")[""][0]
    assert list(losses) == list(range(STEPS))


def test_the_budget_is_agreed_upon(group: Results) -> None:
    counts = {rank["budget"]["collectives"] for rank in group[1]}
    assert len(counts) == 1 and counts.pop() < STEPS


def test_a_rank_that_watches_alone_does_not_wait(group: Results) -> None:
    assert group[1][0]["apart"]["collectives"] == 0
    run = equipoise.open_run(group[0] / "apart.eqp")
    assert "gradient.norm" in run.quantities


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    """One process that holds every head."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        "tp": trained_whole(without_batch_norm(), folder / "tp.eqp", preset="deep"),
        "llama": trained_whole(Llama(), folder / "l.eqp", clip=True, preset="deep"),
    }


# Drawn over all heads with one generator; differentiated as one process would.
UNREAD = ("baek_v1.kappa_", "curvature.")


@pytest.mark.parametrize("name", ["tp", "llama"])
def test_tensor_parallel_readings_are_those_of_one_process(
    group: Results, whole: dict[str, Whole], name: str
) -> None:
    run, alone = equipoise.open_run(group[0] / f"{name}.eqp"), whole[name].run
    missing = set(alone.quantities) - set(run.quantities)
    assert missing and all(q.startswith(UNREAD) for q in missing)
    assert not any(q.startswith(UNREAD) for q in run.quantities)
    errors = run.series("projection.norm.error")
    assert errors.keys() == run.series("projection.G").keys()
    assert all((values == 0).all() for _, values in errors.values())
    assert_readings(run, alone, of=run.quantities)


@pytest.mark.parametrize("name", ["tp", "llama"])
def test_norms_of_sharded_maps_are_singular_values_of_the_whole(
    group: Results, whole: dict[str, Whole], name: str
) -> None:
    run = equipoise.open_run(group[0] / f"{name}.eqp")
    assert_norms(run, whole[name].norms)


# Each rank has the tokens of its half: what takes all tokens is a mean of two.
OF_TOKENS = {
    *("residual.kurtosis", "residual.token_cosine", "norm.sigma.p50"),
    *("precision.kappa_ln", "precision.epsilon_share.p50", "baek_v1.c_ln"),
    "baek_v1.rho_ln",
}


def test_sequence_parallel_readings(
    group: Results, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Norms' gradients are sums that no rank holds, and are read all the same."""
    run = equipoise.open_run(group[0] / "sequence.eqp")
    path = tmp_path_factory.mktemp("sequence") / "one.eqp"
    alone = trained_whole(wide(), path, preset="deep", lr=RATE)
    assert_readings(run, alone.run, of={*run.quantities} - OF_TOKENS)
    assert_norms(run, alone.norms)
    ranks = [rank["sequence.truth"]["findings"] for rank in group[1]]
    assert ranks[0] == ranks[1]
    (named,) = [line for line in ranks[0] if "some tokens of every sequence" in line]
    # The first block is given whole sequences, and keeps a part of them.
    assert equipoise.Finding.from_json(named).site == "blocks.1"


def test_a_nan_under_fsdp_is_searched_on_the_rank_that_holds_it(group: Results) -> None:
    """FSDP takes back the memory of weights that the graph still points to."""
    first, second = (rank["fsdp.poison"]["findings"] for rank in group[1])
    assert first == second
    (found,) = passes(first)
    assert (found.step, found.code, found.params["rank"]) == (
        1,
        "nonfinite.forward",
        1,
    )


@pytest.mark.parametrize("name", ["tp", "llama"])
def test_what_tensor_parallelism_hides_is_named(group: Results, name: str) -> None:
    ranks = [rank[f"{name}.truth"] for rank in group[1]]
    assert ranks[0]["findings"] == ranks[1]["findings"]
    found = [equipoise.Finding.from_json(line) for line in ranks[0]["findings"]]
    assert {f.severity for f in found} == {"info"}
    heads, model = sorted(found, key=lambda f: f.site, reverse=True)
    assert heads.code == "watch.unread.heads_drawn"
    assert heads.params["sites"] == 2
    assert model.code == "watch.unread.weights_sharded"
    assert all(rank["collectives"] == 3 for rank in ranks)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_nan_on_either_half_of_the_heads_is_one_finding(
    group: Results, bad: int
) -> None:
    first, second = (rank[f"tp.poison.{bad}"]["findings"] for rank in group[1])
    assert first == second
    assert [(f.step, f.code, f.params["rank"]) for f in passes(first)] == [
        (1, "nonfinite.forward", bad)
    ]


def test_ranks_at_different_steps_are_not_put_together(group: Results) -> None:
    """One samples steps 0, 2, 4, the other 0, 3: only step 0 is of both."""
    for rank in group[1]:
        found = [json.loads(text) for text in rank["other steps"]["findings"]]
        (lost,) = [f for f in found if f["code"] == "watch.rank_lost"]
        assert lost["params"]["steps"] == "rank 0: 2, rank 1: 3"
        assert rank["other steps"]["collectives"] == 0, "alone from then on"
    run = equipoise.open_run(group[0] / "other.eqp")
    steps, losses = run.series("loss")[""]
    assert list(steps) == list(range(STEPS)) and bool((losses == losses).all())
    alone = run.series("gradient.norm")["head"][0]
    assert 2 not in alone and max(alone) > 2, "read again from the next step on"


def test_a_step_that_one_rank_leaves_out_is_noticed(group: Results) -> None:
    """Step 1 of rank 1 is of its third batch, though both count alike."""
    for rank in group[1]:
        found = [json.loads(text) for text in rank["left out"]["findings"]]
        (apart,) = [f for f in found if f["code"] == "watch.ranks_apart"]
        assert apart["step"] == 1
        assert apart["params"]["cleared"] == "rank 0: 0, rank 1: 1"
    for kind in ("ddp.watched", "fsdp.watched", "budget"):
        texts = [text for rank in group[1] for text in rank[kind]["findings"]]
        assert not any("watch.ranks_apart" in text for text in texts)
