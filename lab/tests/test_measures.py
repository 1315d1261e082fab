"""Measures of a run file that was written by hand, so that every number is known."""

import math
from pathlib import Path

import pytest

from equipoise.records import Reading, RunInfo
from equipoise.store import RunWriter, open_run
from equipoise_lab.models import GPTConfig
from equipoise_lab.results.finding import Row
from equipoise_lab.results.measures import measures, per_layer, ratio
from equipoise_lab.results.publishing import write_page
from equipoise_lab.results.statistics import summary
from equipoise_lab.running.experiment import Arm, Experiment

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def written(path: Path) -> Path:
    info = RunInfo(
        name="pre", created="now", version="0", details={"blocks": list(BLOCKS)}
    )
    with RunWriter(path, info) as writer:
        for step in (0, 10, 20):
            writer.append(readings(step))
    return path


def readings(step: int) -> list[Reading]:
    def over_layers(quantity: str, *values: float) -> Reading:
        return Reading(
            step=step,
            quantity=quantity,
            sites=BLOCKS[: len(values)],
            values=tuple((v,) for v in values),
        )

    grown = math.exp(step / 10)
    heads = Reading(
        step=step,
        quantity="attention.theta.p5",
        sites=("blocks.0.attention", "blocks.1.attention"),
        values=((0.8, 1.0), (0.5, 0.5)),
    )
    return [
        over_layers("gradient.norm", 4.0, 0.01, 2.0),
        over_layers("sensitivity.S", 1.0, math.e, math.e**2),
        over_layers("projection.G", grown, grown),
        over_layers("residual.B", grown, grown),
        over_layers("residual.token_cosine", step / 20),
        over_layers("backward.norm_factor", math.e, math.e ** (1 + step)),
        heads,
    ]


def test_known_numbers(tmp_path: Path) -> None:
    found = measures(written(tmp_path / "run.eqp"))
    assert found == pytest.approx(
        {
            "gradient_first_to_last": 2.0,
            "gradient_least_to_last": 0.005,
            "gradient_least_to_last_start": 0.005,
            "gradient_spread": 200.0,
            "growth_G": 2.0,
            "growth_B2": 4.0,
            "theta_p5": 0.7,
            "theta_p5_start": 0.7,
            "theta_least": 0.5,
            "norm_factor": (math.e + math.e**11) / 2,
            "norm_factor_start": math.e,
            "ln_norm_factors": 12.0,
            "ln_norm_factors_start": 2.0,
            "token_cosine": 0.5,
            "token_cosine_start": 0.0,
            "S": math.e,
            "S_start": math.e,
            "S_cv": 0.7291,
            "S_slope": 2.0,
        },
        rel=1e-3,
    )


def test_what_was_not_recorded_is_absent(tmp_path: Path) -> None:
    info = RunInfo(name="bare", created="now", version="0")
    with RunWriter(tmp_path / "run.eqp", info) as writer:
        writer.append([Reading.scalar(0, "loss", 1.0)])
    assert measures(tmp_path / "run.eqp") == {}
    assert per_layer(open_run(tmp_path / "run.eqp"), "gradient.norm") == {}


def test_ratios_of_nothing() -> None:
    assert ratio(1.0, 0.0) == math.inf and math.isnan(ratio(0.0, 0.0))


def test_the_page_carries_the_experiments_table(tmp_path: Path) -> None:
    arm = Arm(name="pre", model=GPTConfig(depth=1))
    experiment = Experiment(
        name="one", question="Does it?", arms=(arm,), seeds=(1,), measures=("loss",)
    )
    task = experiment.tasks[0]
    (tmp_path / task.folder).mkdir(parents=True)
    written(tmp_path / task.folder / "run.eqp")
    rows = [
        Row(arm="pre", values={"loss": summary([1.25])}, against_first=None, seeds=(1,))
    ]
    page = write_page(experiment, tmp_path, rows, verdict="It does.").read_text()
    assert "Does it?" in page and "It does." in page and "1.25" in page
