"""The forecast on three recorded runs: a ramp that fails, a mild one, a healthy one."""

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equipoise.lab.storms import diagnosis, evaluation, fitting
from equipoise.lab.storms.bands import IS_CHANGE, LEAST_REACH, Bands, scores
from equipoise.lab.storms.labels import Label, labels
from equipoise.lab.storms.probabilities import probabilities
from equipoise.lab.storms.recorded import recorded

PACKED = Path(__file__).parent / "fixtures" / "storms.zip"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Label]:
    root = tmp_path_factory.mktemp("storms")
    with zipfile.ZipFile(PACKED) as packed:
        packed.extractall(root)
    return sorted(labels(root), key=lambda label: label.storm.severity)


def test_the_recorded_runs_have_their_labels(found: Sequence[Label]) -> None:
    assert [label.outcome for label in found] == ["survived", "survived", "failed"]
    severe = found[-1]
    assert severe.is_forecastable and severe.injected == 100
    assert severe.onset is not None and 150 < severe.onset < 250


def test_a_fit_tells_the_failure_from_the_rest(found: Sequence[Label]) -> None:
    runs = [recorded(label) for label in found]
    model = fitting.fit(runs)
    assert model.made_by["families"] == ["ramp"]
    highest = [scores(model, r)[r.rows].max() for r in runs]
    assert highest[2] > max(highest[:2]) + 0.1
    quality = probabilities([(r, model) for r in runs], draws=20)
    assert quality["auroc"]["value"] > 0.7  # of a band that two runs made


def test_the_odds_are_fair_on_the_stable_runs(found: Sequence[Label]) -> None:
    """Given the bin before, the mean of e over stable readings is at most 1."""
    runs = [recorded(label) for label in found]
    options = fitting.FitOptions()
    bands = Bands(runs, ages=options.ages, narrowest=options.narrowest)
    z = [bands.unseen(run) for run in runs]
    edges = np.quantile(np.concatenate(z[:2]), [0.5, 0.9])
    odds = fitting._odds(runs, z, edges, boldest=2.0)
    shares = np.zeros((4, 3))
    for run, scored in zip(runs[:2], z[:2], strict=True):
        now = np.searchsorted(edges, scored[run.rows], side="right")
        np.add.at(shares, (now[:-1], now[1:]), 50 / len(now))
    for before in range(3):
        total = shares[before].sum()
        if total > 20:  # where smoothing by the overall shares has little weight
            assert (shares[before] * np.exp(odds[before])).sum() / total < 1.1


def test_a_band_reaches_as_far_as_runs_of_other_seeds_went(
    found: Sequence[Label],
) -> None:
    """No stable run is outside its own band; without it, one of them is."""
    runs = [recorded(label) for label in found]
    model = fitting.fit(runs)
    inside = [scores(model, run)[run.rows].max() for run in runs[:2]]
    assert max(inside) <= 1e-3
    options = fitting.FitOptions()
    bands = Bands(runs, ages=options.ages, narrowest=options.narrowest)
    unseen = [bands.unseen(run)[run.rows].max() for run in runs[:2]]
    assert max(unseen) > max(inside)


def test_the_least_change_counts_from_no_change(found: Sequence[Label]) -> None:
    """Where stable runs fall, a run that stays as it was is not outside the band."""
    band = fitting.fit([recorded(label) for label in found]).band
    edges = np.asarray(band.centre) + np.asarray(band.reach)
    assert (edges[:, IS_CHANGE] >= LEAST_REACH[IS_CHANGE] - 1e-3).all()
    assert (np.asarray(band.centre)[:, IS_CHANGE] < -0.05).any()


def test_causes_are_learnt_from_the_readings_after_the_alarm(
    found: Sequence[Label],
) -> None:
    """A run's mirror image is another family: each is told from the other."""
    run, model = recorded(found[-1]), shipped()
    step = diagnosis.asked_at(run, model)
    assert step in [s for s, v in evaluation.stake_course(run, model) if v >= 1]
    storm = replace(run.label.storm, family="residual")
    mirror = replace(run, label=replace(run.label, storm=storm))
    centre = np.asarray(model.course.centre)
    row = np.searchsorted(model.course.ages, run.age, side="right")
    mirror = replace(mirror, x=2 * centre[row] - run.x)
    causes = diagnosis.fit_causes([run, mirror], model)
    assert list(causes.families) == ["ramp", "residual"]
    for one in (run, mirror):
        rows = diagnosis.telling(one, model)
        assert 1 <= len(rows) <= 5  # 20 steps, a reading every five
        assert causes.ranked(rows[-1])[0][0] == one.label.storm.family
