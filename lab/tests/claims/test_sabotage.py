"""A verdict follows from its check: sabotaged, the check gives another one."""

import json
from pathlib import Path
from typing import Any

import pytest

from equipoise_lab.claims import catalogue, published_results
from equipoise_lab.claims.result import Claim
from equipoise_lab.commands import claims as command
from equipoise_lab.commands import lab_actions
from equipoise_lab.results import publishing
from equipoise_lab.studies.catalogue import recipe
from lab.benchmarks.claims_sabotage import (
    experiment_kills,
    is_experiment,
    kills,
    numbers_changed,
    spoil,
)

RESULTS = json.loads(
    (Path(__file__).parents[3] / "benchmarks/results/claims_sabotage.json").read_text()
)
PAIRED_SEEDS = 10
"""Of the policies in the third part of ``fragility``; its other parts have three."""
SECONDS = 0.3
"""CPU seconds that sabotaging a claim took: the dearer ones are in the benchmark."""
CHEAP = {
    row["claim"]
    for row in RESULTS["rows"]
    if row["seconds"] < SECONDS or row["verdict"] == "corrected"
}
CLAIMS = [c for c in catalogue.select() if c.id in CHEAP and not is_experiment(c)]
KNOWN = {row["claim"] for row in RESULTS["rows"]}
EXPERIMENTS = [c for c in catalogue.select() if is_experiment(c) and c.id in KNOWN]


def test_enough_claims_are_sabotaged() -> None:
    """All of the benchmark's claims changed; here run those that cost little."""
    assert RESULTS["cannot_change"] == []
    assert len(CLAIMS) + len(EXPERIMENTS) >= 40
    corrected = {r["claim"] for r in RESULTS["rows"] if r["verdict"] == "corrected"}
    assert len(corrected) >= 10 and corrected <= {c.id for c in CLAIMS}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_sabotaged_check_gives_another_verdict(claim: Claim) -> None:
    what, _ = kills(claim)
    assert what, f"no change of {claim.id} changes its verdict"


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    spoil(folder)
    return folder


@pytest.mark.parametrize("claim", EXPERIMENTS, ids=lambda claim: claim.id)
def test_an_experiment_with_spoiled_results_is_judged_anew(
    claim: Claim, spoiled: Path
) -> None:
    what, _ = experiment_kills(claim, spoiled)
    assert what, f"no spoiled result changes the verdict on {claim.id}"


@pytest.mark.parametrize("name", sorted({*published_results.EXPERIMENTS.values()}))
def test_full_can_run_what_claims_are_judged_by(name: str) -> None:
    """A page that no command makes stopped ``--full`` half way."""
    assert all(recipe(one).tasks for one in lab_actions._named(name))


@pytest.mark.parametrize("claim", EXPERIMENTS, ids=lambda claim: claim.id)
def test_an_interval_counts_seeds_not_arms(claim: Claim) -> None:
    """Arms of one seed share its data: counted one by one, intervals are too narrow."""
    page = published_results.EXPERIMENTS[claim.id]
    seeds = len(publishing.published(published_results.BUILT)[page].seeds)
    most = PAIRED_SEEDS if page == "fragility" else seeds
    assert claim.run().evidence.get("seeds", 0) <= most


def test_nothing_at_all_supports_no_pattern(tmp_path: Path) -> None:
    """Zeros in every arm: a criterion that they pass is none."""
    spoil(tmp_path, {"zeros": lambda table: numbers_changed(table, lambda x: 0.0)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(published_results.VARIABLE, str(tmp_path / "zeros"))
        found = {claim.id: claim.run().verdict for claim in EXPERIMENTS}
    assert "pattern reproduced" not in found.values(), found


def test_full_runs_the_experiments_and_judges_what_they_gave(
    spoiled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran, rotated = list[str](), spoiled / "arms rotated"

    def run(name: str, *, publish: Path, **options: Any) -> None:
        ran.append(name)
        place = publish / name
        place.mkdir(parents=True)
        (place / "raw.json").write_bytes((rotated / name / "raw.json").read_bytes())

    monkeypatch.setattr(lab_actions, "run", run)
    monkeypatch.setenv("EQUIPOISE_LAB", str(tmp_path))
    monkeypatch.setenv(published_results.VARIABLE, str(published_results.BUILT))
    command.command(claim="pre_norm_ends_lower")
    assert "pattern reproduced" in " ".join(capsys.readouterr().out.split())
    command.command(claim="pre_norm_ends_lower", full=True)
    assert ran == ["prepost", "prepost-sizes"]
    assert "not reproduced" in " ".join(capsys.readouterr().out.split())
