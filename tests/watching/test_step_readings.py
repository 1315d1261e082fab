"""Readings that follow from others: absent when their parts are, never 0."""

import math
from pathlib import Path

import pytest
import torch

import equipoise
from equipoise.judging.facts import Facts
from equipoise.records import Reading
from equipoise.watching.step.readings import (
    RecordedSettings,
    StepScalars,
    derived_readings,
)

BLOCKS = ["h.0", "h.1"]


def reading(quantity: str, **values: tuple[float, ...]) -> Reading:
    sites = tuple(name.replace("_", ".") for name in values)
    return Reading(
        step=3, quantity=quantity, sites=sites, values=tuple(values.values())
    )


def test_a_rate_that_a_scheduler_changes_in_place_was_copied() -> None:
    rate, scalars = torch.tensor(0.5), StepScalars()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    for step in range(2):
        scalars.add_rate(step, optimizer)
        rate.mul_(0.5)
    assert [value for _, _, value in scalars.pop()] == [0.5, 0.25]


def test_a_setting_is_recorded_as_it_moves_and_no_oftener() -> None:
    weight, bias = (torch.zeros(1, requires_grad=True) for _ in range(2))
    groups = [{"params": [bias], "weight_decay": 0.0}, {"params": [weight]}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    recorded = RecordedSettings()
    first = dict(recorded.moved(optimizer, 0))
    assert first == {
        "optimizer.weight_decay": 0.01,
        "optimizer.epsilon": 1e-8,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
    }
    assert recorded.moved(optimizer, 0) == []
    optimizer.param_groups[1]["weight_decay"] = 30.0
    settings = dict(recorded.moved(optimizer, 0))
    assert settings == {"optimizer.weight_decay": 30.0}
    assert "optimizer.beta2.2" in dict(recorded.moved(optimizer, 1))


def test_a_setting_of_the_loop_is_recorded_at_the_sample_that_shows_it() -> None:
    def seen(step: int, rows: int, **others: dict[str, object]) -> Facts:
        batch = {"sequences": rows, "micro_batches": 2, "parallel": "data"}
        return Facts(step=step, ranks=({"batch": batch, **others}, {"batch": batch}))

    recorded = RecordedSettings()
    clipping = {"each": [{"largest": 1.0}]}
    first = recorded.of_loop(seen(0, 8, clipping=clipping, scaler={"factor": 2.0**16}))
    assert first == [
        (0, "loop.batch_size", 32.0),
        (0, "loop.clipping_limit", 1.0),
        (0, "loop.loss_scale", 65536.0),
    ]
    assert recorded.of_loop(seen(10, 8)) == []
    assert recorded.of_loop(seen(20, 1)) == [(20, "loop.batch_size", 4.0)]
    assert recorded.of_loop(Facts(step=30, ranks=({},))) == []


def test_a_batch_that_shrinks_is_in_the_run_file(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    path = tmp_path / "run.eqp"
    with equipoise.watch(model, optimizer, run=path, every=1, quiet=True):
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(8 if step < 3 else 2, 5, 8)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    news, _ = equipoise.open_run(path).since(0)
    found = [
        (r.step, r.quantity, r.values[0][0])
        for r in news.readings
        if r.quantity.startswith("loop.")
    ]
    assert found == [
        (0, "loop.batch_size", 8.0),
        (0, "loop.clipping_limit", 1.0),
        (3, "loop.batch_size", 2.0),
    ]


def table(*readings: Reading) -> dict[str, dict[str, tuple[float, ...]]]:
    found = derived_readings(3, readings, BLOCKS)
    return {r.quantity: dict(zip(r.sites, r.values, strict=True)) for r in found}


def test_the_whole_gradient_and_the_ratio_of_its_ends() -> None:
    found = table(reading("gradient.norm", h_0=(3.0,), h_1=(4.0,), head=(12.0,)))
    assert found["gradient.norm.total"] == {"": (13.0,)}
    assert found["gradient.first_to_last"] == {"": (0.75,)}


def test_a_norm_that_clipping_gave_is_not_given_twice() -> None:
    clipped = Reading.scalar(3, "gradient.norm.total", 5.0)
    assert "gradient.norm.total" not in table(
        clipped, reading("gradient.norm", h_0=(3.0,))
    )


def test_an_update_is_compared_with_what_it_moves() -> None:
    found = table(
        reading("update.norm", h_0=(0.5,), h_1=(1.0,)),
        reading("weight.norm", h_0=(10.0,), h_1=(0.0,)),
    )
    assert found["update.ratio"] == {"h.0": (0.05,)}


def test_S_multiplies_its_factors_and_their_logarithms_add_up() -> None:
    found = table(
        reading("projection.G", h_0_attn=(2.0,), h_1_attn=(3.0,)),
        reading("attention.theta.mean", h_0_attn=(0.5, 1.0), h_1_attn=(1.0, 1.0)),
        reading("attention.B", h_0_attn=(4.0,)),
        reading("residual.B", h_0=(5.0,), h_1=(6.0,)),
    )
    assert found["sensitivity.S"] == {"h.0.attn": (0.75 * 16 * 2,)}
    residual = found["sensitivity.S_residual"]
    assert residual == {"h.0.attn": (0.75 * 25 * 2,), "h.1.attn": (36 * 3,)}
    parts = ("sensitivity.ln_theta", "sensitivity.ln_G", "sensitivity.S.ln_B2")
    total = sum(found[part]["h.0.attn"][0] for part in parts)
    assert total == pytest.approx(math.log(found["sensitivity.S"]["h.0.attn"][0]))


def test_no_readings_derive_from_none() -> None:
    assert derived_readings(3, [], BLOCKS) == []
    assert derived_readings(3, [reading("projection.G", h_0_attn=(2.0,))], BLOCKS) == []


@pytest.mark.parametrize("theta", [0.0, 1e-45, 1e-320])
def test_a_factor_that_vanishes_is_a_finite_reading(theta: float) -> None:
    """Whether it is 0 or the smallest number depends on the CPU: both read alike."""
    found = table(
        reading("projection.G", h_0_attn=(2.0,)),
        reading("attention.theta.mean", h_0_attn=(theta,)),
    )
    assert found["sensitivity.ln_theta"]["h.0.attn"] == (-126 * math.log(2),)


def test_a_shared_layer_has_one_S_for_each_pass() -> None:
    """ALBERT's twelve passes run one layer: each has its own θ, B and G."""
    site = {"h.0.attn": (1.0,), "h.0.attn#1": (2.0,)}

    def of(quantity: str, values: dict[str, tuple[float, ...]]) -> Reading:
        sites = tuple(values)
        return Reading(
            step=3, quantity=quantity, sites=sites, values=tuple(values.values())
        )

    found = table(
        of("projection.G", site),
        of("attention.theta.mean", {name: (0.5,) for name in site}),
        of("attention.B", {"h.0.attn": (3.0,), "h.0.attn#1": (4.0,)}),
        of("residual.B", {"h.0": (5.0,), "h.0#1": (6.0,)}),
    )
    assert found["sensitivity.S"] == {"h.0.attn": (4.5,), "h.0.attn#1": (16.0,)}
    residual = found["sensitivity.S_residual"]
    assert residual == {"h.0.attn": (12.5,), "h.0.attn#1": (36.0,)}


def test_a_last_block_whose_gradient_is_rounding_has_no_ratio() -> None:
    for last in (0.0, 1e-17):
        norms = reading("gradient.norm", h_0=(3.0,), h_1=(last,), head=(1.0,))
        assert "gradient.first_to_last" not in table(norms)
