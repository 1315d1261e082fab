"""ε goes up where it is set, is restored bit for bit, and keeps to its budget."""

import pytest
import torch
from torch import nn

from equipoise.errors import InputError
from equipoise.numerics.formats import FORMATS
from equipoise.remedies.base import Remedy
from equipoise.remedies.epsilon import (
    Bgss,
    Budget,
    Epsilon,
    LayerNormEpsilon,
    NormState,
    epsilons,
    noise_rule,
    published_rule,
)


def model() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-6))


def test_apply_and_undo() -> None:
    patient = model()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 1e-3
    before = patient(x)
    remedy = Epsilon(values={"0": 1e-2})
    assert isinstance(remedy, Remedy)
    undo = remedy.apply(patient)
    assert epsilons(patient) == {"0": 1e-2, "2": 1e-6}
    assert not torch.equal(patient(x), before)
    undo()
    assert epsilons(patient) == {"0": 1e-5, "2": 1e-6}
    assert torch.equal(patient(x), before)


@pytest.mark.parametrize("only", [(), ("0", "2")])
def test_no_norm_is_lowered(only: tuple[str, ...]) -> None:
    """By name too: a norm that was named had its larger ε replaced."""
    one = nn.Sequential(nn.LayerNorm(8, eps=1e-2), nn.Linear(8, 8), nn.LayerNorm(8))
    undo = LayerNormEpsilon(value=1e-3, only=only).apply(one)
    assert epsilons(one) == {"0": 1e-2, "2": 1e-3}
    undo()
    assert epsilons(one) == {"0": 1e-2, "2": 1e-5}


def test_errors() -> None:
    with pytest.raises(InputError, match="value of layer_norm_epsilon must be pos"):
        LayerNormEpsilon(value=-1.0)
    with pytest.raises(InputError, match="no norm called 1"):
        LayerNormEpsilon(only=("1",)).apply(model())
    with pytest.raises(InputError, match="no norm called 1; there are 0, 2"):
        Epsilon(values={"1": 1e-3}).apply(model())
    with pytest.raises(InputError, match="must be positive"):
        Epsilon(values={"0": 0.0})
    with pytest.raises(InputError, match="2 scores for 3 layers"):
        Bgss(layers=3).step(0, total_risk=1.0, scores=[1.0, 2.0])
    with pytest.raises(InputError, match="must rise"):
        Budget(base=1.0)


def state(variance: float, power: float | None = None) -> NormState:
    return NormState(variance=variance, power=power or variance, width=128, eps=1e-5)


@pytest.mark.parametrize("variance", [1e-4, 1e-2, 1.0, 100.0])
def test_published_rule_is_idle_on_real_activations(variance: float) -> None:
    assert published_rule(state(variance), FORMATS["fp16"]) == 1e-5


def test_published_rule_fires_below_its_threshold() -> None:
    raised = published_rule(state(7.9e-5), FORMATS["fp16"])
    assert raised == pytest.approx(7.9e-5 * 128 * 2**-10 / 0.6)


def test_noise_rule_holds_the_noise_to_its_share() -> None:
    # A token of mean 100 and variance 1e-3 stored in fp16 is mostly noise.
    noisy = state(1e-3, power=1e4)
    fmt = FORMATS["fp16"]
    raised = noise_rule(noisy, fmt, cap=1.0)
    noise = fmt.unit_roundoff**2 * 1e4 / 3
    assert noise / (1e-3 + raised) == pytest.approx(0.1)
    assert noise_rule(state(1e-3, power=1e6), fmt) == 1e-2
    assert noise_rule(state(1.0), fmt) == 1e-5


def test_noise_rule_fires_where_stored_tokens_are_noise() -> None:
    """The predicted noise is what rounding really does to a token's variance."""
    from equipoise.numerics.rounding import rounded

    rng = torch.Generator().manual_seed(0)
    x = 100 + 0.03 * torch.randn(64, 512, generator=rng, dtype=torch.float64)
    noise = (rounded(x, FORMATS["fp16"]) - x).var().item()
    model_noise = 2**-22 * 1e4 / 3
    assert 0.3 < noise / model_noise < 1.2


def test_bgss_steps_and_budget() -> None:
    controller = Bgss(layers=1)
    ladder = []
    for step in range(200):
        ladder += controller.step(step, total_risk=1.0, scores=[1.0]).values()
    expected = [4.0e-5, 1.15e-4, 2.70e-4, 5.54e-4, 1.02e-3, 1.73e-3]
    assert ladder == pytest.approx(expected, rel=5e-3)


def test_bgss_warmup_ranking_cooldown_and_limit() -> None:
    controller = Bgss(layers=20)
    scores = [float(i) for i in range(20)]
    acted: dict[int, list[int]] = {}
    for step in range(120):
        for layer in controller.step(step, total_risk=1.0, scores=scores):
            acted.setdefault(layer, []).append(step)
    steps = sorted(s for at in acted.values() for s in at)
    assert steps[0] == 24 and len(steps) == 24
    assert max(steps.count(s) for s in steps) == 2
    assert {19, 18} == {layer for layer, at in acted.items() if at[0] == 24}
    for at in acted.values():
        assert all(b - a > 10 for a, b in zip(at, at[1:], strict=False))


def test_bgss_fires_only_in_the_top_fifth() -> None:
    controller = Bgss(layers=2)
    for step in range(30):
        controller.step(step, total_risk=float(step % 10), scores=[1.0, 1.0])
    before = sum(controller.actions)
    assert controller.step(30, total_risk=5.0, scores=[1.0, 1.0]) == {}
    assert sum(controller.actions) == before
