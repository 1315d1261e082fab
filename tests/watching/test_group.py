"""Two ranks: the bits of the unwatched, the truth of one process, one verdict."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equipoise
from equipoise.probes.histogram import HISTOGRAM, width_at
from tests.watching.dying import free_port
from tests.watching.group import STEPS, calm, halves
from tests.watching.patients import batches, objective
from tests.watching.sharded import Llama, probes

Results = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("group")
    port = free_port()
    module = [sys.executable, "-m", "tests.watching.group"]
    ranks = [
        subprocess.Popen(
            [*module, str(rank), port, str(folder)],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
    files = (folder / f"rank-{rank}.json" for rank in (0, 1))
    return folder, [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> equipoise.Run:
    """One process that sees both halves of every batch."""
    model = calm()
    # SGD: Adam's signs would carry a rounding of 1e-8 to 1e-4 in two steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tmp_path_factory.mktemp("truth") / "one.eqp"
    with equipoise.watch(model, optimizer, run=run, every=2):
        for batch in batches(STEPS):
            objective(model, torch.cat(halves(batch))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return equipoise.open_run(run)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_the_group_cannot_tell(group: Results, kind: str) -> None:
    """Twenty steps: losses, gradients, evaluations, weights, optimiser and RNG."""
    for rank in group[1]:
        assert rank[f"{kind}.alone"]["bits"] == rank[f"{kind}.watched"]["bits"]
        assert rank[f"{kind}.watched"]["collectives"] == 7
    run = equipoise.open_run(group[0] / f"{kind}-bits.eqp")
    assert list(run.series("loss")[""][0]) == list(range(20))


NORMS = ["gradient.norm", "gradient.norm.total", "projection.G", "projection.norm.q"]


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
    assert first == second and len(first) == 1
    found = equipoise.Finding.from_json(first[0])
    assert (found.step, found.rule) == (1, "nonfinite.forward")
    assert found.evidence["rank"] == bad and found.evidence["kind"] == "NaN"
    written = equipoise.open_run(group[0] / f"poison-{bad}.eqp").findings
    assert written == [found]


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


def test_a_rank_that_watches_alone_waits_for_nobody(group: Results) -> None:
    assert group[1][0]["apart"]["collectives"] == 0
    run = equipoise.open_run(group[0] / "apart.eqp")
    assert "gradient.norm" in run.quantities


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, equipoise.Run]:
    """One process that holds every head."""
    folder = tmp_path_factory.mktemp("whole")
    runs = {}
    for name, model in (("tp", calm()), ("llama", Llama())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = folder / f"{name}.eqp"
        with equipoise.watch(model, optimizer, run=run, every=2, probes=probes(1)):
            for batch in batches(STEPS):
                objective(model, torch.cat(halves(batch))).backward()
                if name == "llama":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        runs[name] = equipoise.open_run(run)
    return runs


# Whole matrices, or all heads together: no rank has them, and gathering is no hook's.
UNREAD = ("projection.norm", "projection.G", "sensitivity.", "baek_v1.kappa", "baek_v2")
# Rounds to bf16: the last bit of a query decides which way, at a few hundred places.
JUMPS = ("precision.rms_error",)


@pytest.mark.parametrize("name", ["tp", "llama"])
def test_tensor_parallel_readings_are_those_of_one_process(
    group: Results, whole: dict[str, equipoise.Run], name: str
) -> None:
    run = equipoise.open_run(group[0] / f"{name}.eqp")
    missing = set(whole[name].quantities) - set(run.quantities)
    assert all(q.startswith(UNREAD) or q == "attention.lipschitz" for q in missing)
    assert {"projection.qk", "projection.vo", "attention.lipschitz.heads"} <= {
        *run.quantities
    }
    for quantity in run.quantities:
        expected, found = whole[name].series(quantity), run.series(quantity)
        assert expected.keys() == found.keys()
        for site, (steps, values) in expected.items():
            assert list(found[site][0]) == list(steps)
            torch.testing.assert_close(
                torch.tensor(found[site][1]),
                torch.tensor(values),
                rtol=5e-2 if quantity.startswith(JUMPS) else 1e-5,
                atol=1e-7,
                msg=lambda text, q=quantity: f"{q}: {text}",
            )


@pytest.mark.parametrize("name", ["tp", "llama"])
def test_what_tensor_parallelism_hides_is_named(group: Results, name: str) -> None:
    ranks = [rank[f"{name}.truth"] for rank in group[1]]
    assert ranks[0]["findings"] == ranks[1]["findings"]
    (found,) = [equipoise.Finding.from_json(line) for line in ranks[0]["findings"]]
    assert (found.rule, found.severity) == ("watch.unread", "info")
    assert "sharded over tensor-parallel ranks" in found.message
    assert "projection.G" in found.message and found.evidence["sites"] == 2
    assert all(rank["collectives"] == 3 for rank in ranks)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_nan_on_either_half_of_the_heads_is_one_finding(
    group: Results, bad: int
) -> None:
    first, second = (rank[f"tp.poison.{bad}"]["findings"] for rank in group[1])
    assert first == second
    broken = [
        f for f in map(equipoise.Finding.from_json, first) if f.rule != "watch.unread"
    ]
    assert [(f.step, f.rule, f.evidence["rank"]) for f in broken] == [
        (1, "nonfinite.forward", bad)
    ]
