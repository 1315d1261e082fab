"""Columns lose no spike, changes are dated, runs part where they part."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equipoise.judging.verdict import Verdict
from equipoise.records import Finding, Reading, RunInfo
from equipoise.report.changes import WINDOW, changes, onsets
from equipoise.report.comparison import comparison_json, options_that_differ, parting
from equipoise.report.grids import Grid, grid, in_model_order
from equipoise.report.page_model import chart_json, verdict_json
from equipoise.report.quantities import CATALOGUE, decisive, quantity_of, shown
from equipoise.store import Run, RunWriter, open_run

INFO = RunInfo(name="made", created="now", version="0", details={"blocks": ["h.0"]})


def made(values: np.ndarray, quantity: str = "q", start: int = 0) -> Grid:
    values = np.atleast_2d(values).astype(float)
    steps = np.arange(start, start + values.shape[1])
    return Grid(
        quantity=quantity,
        sites=[f"h.{s}" for s in range(len(values))],
        layers=list(range(len(values))),
        first=steps,
        last=steps,
        low=values,
        mean=np.where(np.isfinite(values), values, np.nan),
        high=values,
        broken=(~np.isfinite(values)).astype(int),
        sampled=False,
    )


def written(path: Path, *readings: Reading, info: RunInfo = INFO) -> Run:
    with RunWriter(path, info) as writer:
        writer.append(readings)
    return open_run(path)


@pytest.mark.parametrize("count", [37, 601, 2000])
def test_columns_keep_extremes_and_means(tmp_path: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(count)
    run = written(
        tmp_path / "r.eqp", *(Reading.scalar(i, "q", v) for i, v in enumerate(x))
    )
    found = grid(run, "q", points=100, between=None)
    assert found.mean.shape[1] <= 100 and found.sampled == (count > 100)
    assert found.low.min() == pytest.approx(x.min())
    assert found.high.max() == pytest.approx(x.max())
    inside = [x[a : b + 1].mean() for a, b in zip(found.first, found.last, strict=True)]
    np.testing.assert_allclose(found.mean[0], inside, atol=1e-6)


def test_a_window_is_finer_than_the_whole(tmp_path: Path) -> None:
    run = written(
        tmp_path / "r.eqp", *(Reading.scalar(i, "q", float(i)) for i in range(1500))
    )
    found = grid(run, "q", points=50, between=(1000, 1040))
    assert found.first[0] <= 1000 and found.last[-1] >= 1040
    assert found.last[-1] - found.first[0] < 100


def test_sites_that_were_read_at_different_steps_share_columns(tmp_path: Path) -> None:
    def q(step: int, **sites: float) -> Reading:
        rows = tuple((value,) for value in sites.values())
        return Reading(step=step, quantity="q", sites=tuple(sites), values=rows)

    run = written(tmp_path / "r.eqp", q(0, a=1, b=3), q(1, b=5), q(2, a=np.nan))
    found = grid(run, "q", points=50, between=None)
    assert found.sites == ["a", "b"] and found.last.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(found.mean, [[1, np.nan, np.nan], [3, 5, np.nan]])
    assert found.broken.tolist() == [[0, 0, 1], [0, 0, 0]]


def test_the_reading_nearest_to_a_step(tmp_path: Path) -> None:
    steps = [*range(0, 1000, 5), 700]  # 700 twice: what was written last is shown
    run = written(
        tmp_path / "r.eqp",
        *(Reading.scalar(s, "q", float(i)) for i, s in enumerate(steps)),
    )
    for asked, step in [
        (0, 0),
        (502, 500),
        (503, 505),
        (10**9, 995),
        (-5, 0),
        (81, 80),
    ]:
        assert run.near("q", asked).step == step
    assert run.near("q", 500).values == ((100.0,),)


def test_layers_come_in_the_order_of_the_model() -> None:
    blocks = ["h.0", "h.1", "h.10"]
    sites = ["embed", "h.10.attn", "h.1.attn", "h.1.mlp", "h.0.attn"]
    assert in_model_order(sites, blocks) == [
        "h.0.attn",
        "h.1.attn",
        "h.1.mlp",
        "h.10.attn",
        "embed",
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at", [20, 50, 80])
def test_a_jump_is_dated(seed: int, at: int) -> None:
    rng = np.random.default_rng(seed)
    x = 0.1 * rng.standard_normal((3, 100)) + 0.02 * np.arange(100)
    x[1, at:] += 4
    onset, _ = onsets(x, least=0.5)
    assert onset[0] == onset[2] == -1 and abs(onset[1] - at) <= 1


def test_noise_trends_and_spikes_are_no_changes() -> None:
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((200, 120))
    decay = 6 * np.exp(-np.arange(120) / 30) + 0.05 * rng.standard_normal((50, 120))
    spike = 0.1 * rng.standard_normal((50, 120))
    spike[:, 60] += 9
    for x in (noise, decay, spike):
        assert (onsets(x, least=0.3)[0] == -1).mean() >= 0.96
    assert onsets(np.ones((1, 2 * WINDOW)), least=0.1)[0].tolist() == [-1]


def test_changes_are_in_order_and_name_the_first_layer() -> None:
    rng = np.random.default_rng(2)
    theta = 1 - 0.01 * rng.random((4, 80))
    theta[2, 30:] -= 0.7
    theta[3, 40:] -= 0.7
    loss = 2 + 0.05 * rng.standard_normal((1, 80))
    loss[0, 60:] += 3
    loss[0, 75] = np.nan
    ours = made(loss[:, ::-1].copy(), "projection.norm.error")  # not the model's
    grids = [ours, made(loss, "loss"), made(theta, "attention.theta.p5")]
    found = changes(grids, {"attention.theta.p5", "loss"})
    assert [c.quantity for c in found] == ["attention.theta.p5", "loss"]
    assert found[0].site == "h.2" and abs(found[0].step - 30) <= 1
    assert found[0].before == pytest.approx(1, abs=0.02)
    assert found[0].after == pytest.approx(0.3, abs=0.02)
    assert abs(found[1].step - 60) <= 1 and not found[1].broken


def firing(rule: str, since: int, severity: str = "warn", **more: object) -> Finding:
    evidence = {"since": since, **more}
    return Finding(
        step=since + 10, severity=severity, code=rule, message="m", params=evidence
    )


def test_a_fault_from_the_first_sample_is_listed_though_nothing_turned() -> None:
    gradient = np.geomspace(1e-6, 1, 4)[:, None] * np.ones((4, 80))
    theta = np.full((4, 80), 1.0)
    theta[1] = 0.01
    grids = [made(theta, "attention.theta.p5"), made(gradient, "gradient.norm")]
    grids.append(made(np.ones((4, 80)), "weight.norm"))
    fired = [
        firing("attention.saturated", 0),
        firing("gradient.vanished", 0, "error", most_in="h.1"),
    ]
    found = changes(grids, {"gradient.norm", "attention.theta.p5"}, fired)
    assert [(c.quantity, c.site, c.step, c.kind) for c in found] == [
        ("gradient.norm", "h.1", 0, "start"),  # the graver
        ("attention.theta.p5", "h.1", 0, "start"),  # the layer where it is worst
    ]
    assert found[0].after == pytest.approx(1e-4)
    assert changes(grids, {"gradient.norm"}) == []


def test_what_fires_before_the_turn_is_dated_by_the_rule() -> None:
    norm = np.ones((2, 80))
    norm[0, 40:] = 1e-6
    slow = firing("gradient.vanished", 7)
    (found,) = changes([made(norm, "gradient.norm")], {"gradient.norm"}, [slow])
    assert (found.step, found.kind) == (7, "slow")
    late = firing("gradient.vanished", 60)
    (found,) = changes([made(norm, "gradient.norm")], {"gradient.norm"}, [late])
    assert (found.step, found.kind) == (40, "turn")


def test_ordinary_learning_is_no_change_but_a_nan_is() -> None:
    rng = np.random.default_rng(2)
    theta = 1 - 0.01 * rng.random((4, 80))
    theta[2, 30:] -= 0.7
    loss = 2 + 0.05 * rng.standard_normal((1, 80))
    loss[0, 75] = np.nan
    grids = [made(loss, "loss"), made(theta, "attention.theta.p5")]
    (found,) = changes(grids, among=())
    assert found.quantity == "loss" and found.broken and found.step == 75
    # Files of earlier versions have NaN where no weight had a gradient.
    assert changes([made(loss, "update.unchanged")], among=()) == []


def test_a_router_is_shown_by_its_most_loaded_expert(tmp_path: Path) -> None:
    load = replace(made(np.full((1, 80), 0.25), "router.load"), high=np.ones((1, 80)))
    collapsed = firing("router.collapsed", 5, most_in="h.0", value=0.5, threshold=0.4)
    (found,) = changes([load], {"router.load"}, [collapsed])
    assert (found.before, found.after) == (1, 1)
    shares = ((0.5, 0.5, 0.0, 0.0),)
    reading = Reading(step=5, quantity="router.load", sites=("h.0",), values=shares)
    run = written(tmp_path / "r.eqp", reading)
    verdict = Verdict(state="at risk", since=5, lead=collapsed)
    chart = chart_json(run, verdict)
    # 0.5 of the experts is not a load of 0.5: the rule's limit is not drawn.
    assert chart is not None and chart["limit"] is None


def test_runs_part_where_they_part() -> None:
    rng = np.random.default_rng(3)
    base = 3 + 0.02 * rng.standard_normal((2, 100))
    other = 3 + 0.02 * rng.standard_normal((2, 100))
    assert parting(made(base), made(other)) is None
    other[1, 42:] *= 1.5
    assert parting(made(base), made(other)) == (42, "h.1")
    # Sampled at other steps: the step is known as well as the columns allow.
    step, site = parting(made(base), made(other[:, ::2], start=0)) or (None, None)
    assert site == "h.1"


@pytest.mark.filterwarnings("error")
def test_zeros_on_a_logarithmic_scale_are_compared_in_silence() -> None:
    base = np.ones((1, 80))
    base[0, 10:12] = 0
    other = base.copy()
    other[0, 40:] = 9.0
    names = {"quantity": "gradient.norm"}
    assert parting(made(base, **names), made(other, **names)) == (40, "h.0")


def test_a_run_that_breaks_parts_there() -> None:
    base, other = np.full((1, 60), 2.0), np.full((1, 60), 2.0)
    other[0, 33:] = np.nan
    assert parting(made(base), made(other)) == (33, "h.0")


def test_a_comparison_names_what_differs() -> None:
    base, other = np.full((1, 60), 2.0), np.full((1, 60), 2.0)
    other[0, 20:] = 5
    grids = {"a": {"loss": made(base, "loss")}, "b": {"loss": made(other, "loss")}}
    details = {"a": {"lr": 1e-3, "opt": {"beta": 0.9}}, "b": {"lr": 1e-2, "opt": {}}}
    found = comparison_json(grids, details, baseline="a", blocks=[])
    assert (
        found["quantities"][0]["parts"] == 20 and found["quantities"][0]["run"] == "b"
    )
    assert "b first parts from a at step 20" in found["sentence"]
    assert found["options"] == [
        ("lr", ["0.001", "0.01"]),
        ("opt.beta", ["0.9", "–"]),
    ]
    assert options_that_differ({"a": {"blocks": [1]}, "b": {"blocks": [2]}}) == []


@pytest.mark.parametrize(
    ("rule", "quantity"),
    [
        ("gradient.vanished", "gradient.norm"),
        ("attention.saturated", "attention.theta.p5"),
        ("logits.growing", "attention.max_logit"),
        ("loss.risen", "loss"),
        ("tokens.collapsed", "residual.token_cosine"),
        ("residual.growing", "residual.B"),
        ("update.large", "update.ratio"),
        ("router.collapsed", "router.load"),
        ("nonfinite.forward", "loss"),
        ("mine.own", "loss"),
    ],
)
def test_the_chart_fits_the_rule(rule: str, quantity: str) -> None:
    assert decisive(rule, None, list(CATALOGUE)) == quantity


def test_a_cause_comes_before_its_effect_on_the_loss(tmp_path: Path) -> None:
    def finding(rule: str, site: str = "", **evidence: float) -> Finding:
        return Finding(
            step=90,
            severity="error",
            code=rule,
            message="m",
            site=site,
            params=evidence,
        )

    loss, cause = finding("loss.risen"), finding("attention.theta", "h.0.a", since=40)
    theta = Reading(
        step=0, quantity="attention.theta.p5", sites=("h.0.a",), values=((1.0,),)
    )
    run = written(tmp_path / "r.eqp", theta, Reading.scalar(0, "loss", 1.0))
    verdict = Verdict(state="failing", since=40, lead=cause, effects=(loss,))
    chart = chart_json(run, verdict)
    assert chart is not None and chart["quantity"] == "attention.theta.p5"
    assert (chart["site"], chart["layer"], chart["step"]) == ("h.0.a", 0, 40)


def test_the_page_names_one_moment_and_the_layer_at_fault(tmp_path: Path) -> None:
    grown = firing("residual.growing", 20, most_in="h.0")
    loss = firing("loss.risen", 50)
    grown = replace(grown, step=95)
    verdict = Verdict(state="failing", since=30, lead=grown, effects=(loss,))
    stream = Reading(step=0, quantity="residual.B", sites=("h.0",), values=((1.0,),))
    run = written(tmp_path / "r.eqp", stream, Reading.scalar(0, "loss", 1.0))
    found = verdict_json(run, verdict)
    assert (found["began"], found["read"]) == (20, 95)
    chart = found["chart"]
    assert (chart["site"], chart["seen"], chart["everywhere"]) == ("h.0", "h.0", True)
    assert chart["seen_layer"] == 0 and chart["quantity"] == "residual.B"
    named = replace(grown, site="h.1")
    made_by = chart_json(run, replace(verdict, lead=named))
    assert made_by is not None and not made_by["everywhere"]
    assert (made_by["site"], made_by["seen"]) == ("h.1", "h.0")
    healthy = verdict_json(run, Verdict(state="healthy", sentence="fine"))
    assert healthy["began"] is None and healthy["read"] is None


def test_a_finding_may_name_its_quantity() -> None:
    stored = ["loss", "gradient.norm", "update.ratio"]
    far = firing("gradient.vanished", 0, quantity="update.ratio")
    assert quantity_of(far, stored) == "update.ratio"
    assert quantity_of(firing("gradient.vanished", 0), stored) == "gradient.norm"


def test_every_entry_is_shown_in_its_place() -> None:
    ranks = [shown(name).rank for name in CATALOGUE]
    assert ranks == sorted(ranks) and shown("not.known").rank == len(CATALOGUE)
