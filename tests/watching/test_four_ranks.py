"""Data parallel times tensor parallel on four ranks: one process's truth, its bits."""

from pathlib import Path
from typing import Any

import pytest

import equipoise
from tests.watching.single_process import (
    Whole,
    assert_norms,
    assert_readings,
    run_ranks,
    trained_whole,
)
from tests.watching.two_ranks import halves
from tests.watching.wide_model import RATE, wide

# What two copies of the model see of different sequences is a maximum or a mean over
# both: these are of all rows, or of weights.
OF_ALL = {
    *(f"attention.{q}" for q in ("B", "entropy", "sink", "max_logit", "theta.mean")),
    *("attention.theta.p0", "attention.theta.p100", "residual.B", "norm.sigma.min"),
    *("gradient.norm", "gradient.first_to_last", "projection.qk", "projection.vo"),
    *("norm.gain", "residual.token_cosine", "loss", "sensitivity.S"),
    *("projection.G", "sensitivity.ln_G", "sensitivity.ln_theta"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def mesh(folder: Path) -> list[dict[str, Any]]:
    return run_ranks("tests.watching.four_ranks", folder, ranks=4)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Whole]:
    """One process with the data of both copies, and with what the twins both have."""
    return {
        "halves": trained_whole(wide(), folder / "all.eqp", preset="deep", lr=RATE),
        "twins": trained_whole(
            wide(),
            folder / "some.eqp",
            preset="deep",
            lr=RATE,
            data=lambda batch: halves(batch)[0],
        ),
    }


def test_four_ranks_train_bit_identically(mesh: list[dict[str, Any]]) -> None:
    for rank in mesh:
        assert rank["alone"]["bits"] == rank["halves"]["bits"]
        assert rank["halves"]["collectives"] == 3


def test_readings_of_all_rows_and_weights(
    mesh: list[dict[str, Any]], folder: Path, alone: dict[str, Whole]
) -> None:
    run = equipoise.open_run(folder / "halves.eqp")
    assert_readings(run, alone["halves"].run, of=OF_ALL)


def test_readings_of_two_copies_that_see_the_same(
    mesh: list[dict[str, Any]], folder: Path, alone: dict[str, Whole]
) -> None:
    """Whatever is not counted twice, and is not counted in bins, is one process's."""
    run = equipoise.open_run(folder / "twins.eqp")
    twice = {"attention.rows_left_out", "attention.theta.p5", "attention.theta.p50"}
    assert_readings(run, alone["twins"].run, of={*run.quantities} - twice)


@pytest.mark.parametrize("name", ["halves", "twins"])
def test_wide_norms_are_followed(
    mesh: list[dict[str, Any]], folder: Path, alone: dict[str, Whole], name: str
) -> None:
    run = equipoise.open_run(folder / f"{name}.eqp")
    assert_norms(run, alone[name].norms)
    for _, values in run.series("projection.norm.error").values():
        assert 0 < values.max() < 5e-3


def test_every_rank_finds_the_same(mesh: list[dict[str, Any]]) -> None:
    for name in ("halves", "twins"):
        first = mesh[0][name]["findings"]
        assert len(first) == 2
        assert all(rank[name]["findings"] == first for rank in mesh)
