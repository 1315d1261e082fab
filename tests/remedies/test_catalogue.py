"""Every remedy on every family: applied, function preserved where promised, undone."""

import copy
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from equipoise.errors import InputError
from equipoise.judging.remedy_catalogue import CATALOGUE
from equipoise.remedies.base import Remedy, Undo
from equipoise.remedies.catalogue import REMEDIES, remedy
from equipoise.remedies.roll_back import snapshot
from tests.remedies.families import (
    FAMILIES,
    a_model,
    an_optimizer,
    differences,
    logits,
    state,
    train,
)

BEFORE_TRAINING = {"deepnorm_init", "path_init"}
ONLY_ROUTED = {"router_balance"}


def prepared(name: str, family: str) -> tuple[nn.Module, Optimizer]:
    """Return a model and an optimiser that has taken steps, where it may have."""
    if name in ONLY_ROUTED:  # its experts hold their last loss: no deep copy
        return _trained(family, 2, experts=2, ffn_width=16)
    steps = 0 if name in BEFORE_TRAINING else 2
    return copy.deepcopy(_once(family, steps))


@cache
def _once(family: str, steps: int) -> tuple[nn.Module, Optimizer]:
    return _trained(family, steps)


def _trained(family: str, steps: int, **lab: Any) -> tuple[nn.Module, Optimizer]:
    model = a_model(family, **lab)
    optimizer = an_optimizer(model)
    train(model, optimizer, steps)
    optimizer.zero_grad()
    return model, optimizer


def made(name: str, model: nn.Module, optimizer: Optimizer) -> Remedy:
    if name == "normaliser":
        return remedy(name, to="sink")
    if name == "roll_back":
        given = snapshot(model, optimizer)
        given["model"] = {n: 0.9 * x for n, x in given["model"].items()}
        return remedy(name, checkpoint=given)
    if name == "keep_fp32":
        return remedy(name, narrow=torch.bfloat16)
    if name == "soft_cap":
        return remedy(name, cap=1.0)
    return remedy(name)


def applied(name: str, family: str) -> tuple[nn.Module, Optimizer, Undo]:
    model, optimizer = prepared(name, family)
    return model, optimizer, made(name, model, optimizer).apply(model, optimizer)


table = pytest.mark.parametrize(
    ("name", "family"),
    [(n, f) for n in REMEDIES for f in FAMILIES if n not in ONLY_ROUTED or f == "lab"],
)


@table
def test_undone_at_once_everything_is_as_it_was(name: str, family: str) -> None:
    model, optimizer = prepared(name, family)
    one = made(name, model, optimizer)
    assert isinstance(one, Remedy) and one.name == name
    before, answers = state(model, optimizer), logits(model).detach()
    undo = one.apply(model, optimizer)
    assert undo.active
    now = logits(model).detach().float()
    if one.preserves_function:
        torch.testing.assert_close(now, answers, rtol=0, atol=1e-5)
    else:
        assert (now - answers).abs().max() > 1e-6
    undo()
    undo()
    assert not undo.active
    assert not differences(before, state(model, optimizer))
    assert torch.equal(logits(model), answers)


@table
def test_undone_after_steps_structure_is_as_it_was(name: str, family: str) -> None:
    model, optimizer = prepared(name, family)
    before = state(model, optimizer)
    undo = made(name, model, optimizer).apply(model, optimizer)
    train(model, optimizer, 3)
    learned = {n: p.detach().clone() for n, p in model.named_parameters()}
    undo()
    after = state(model, optimizer)
    for part in ("order", "attributes", "hooks", "groups", "parameters", "step hooks"):
        assert not differences(before[part], after[part], part)
    assert after["tensors"].keys() == before["tensors"].keys()
    moved = [
        n
        for n, x in before["tensors"].items()
        if not torch.equal(x, after["tensors"][n])
    ]
    assert moved, "nothing was learned"
    here = {p for group in optimizer.param_groups for p in group["params"]}
    assert optimizer.state.keys() <= here
    if name != "sigma_reparam":  # which folds its scale into the weights
        kept = {n: p for n, p in model.named_parameters() if n in learned}
        assert all(torch.equal(p, learned[n].to(p.dtype)) for n, p in kept.items())
    train(model, optimizer, 1)


def test_catalogue_and_advice_name_the_same_remedies() -> None:
    assert set(CATALOGUE) == set(REMEDIES)


def test_the_code_of_every_entry_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, entry in CATALOGUE.items():
        model, optimizer = prepared(name, "lab")
        torch.save(snapshot(model, optimizer), "last.pt")
        names = {"model": model, "optimizer": optimizer}
        exec(entry.code, names)  # noqa: S102
        undo = names["undo"]
        assert isinstance(undo, Undo) and undo.name == name and undo.active
        assert entry.code.count("\n") == 2
        train(model, optimizer)
        undo()


def test_sigma_reparam_undone_after_steps_is_the_same_function() -> None:
    for family in FAMILIES:
        model, optimizer, undo = applied("sigma_reparam", family)
        train(model, optimizer, 3)
        model.eval()
        answers = logits(model)
        undo()
        torch.testing.assert_close(logits(model), answers, rtol=1e-4, atol=1e-5)


PAIRS = (
    "learning_rate",
    "beta2",
    "roll_back",
    "sigma_reparam",
    "qk_norm",
    "temperature",
)
"""One of each mechanism: options, moments, weights, structure, attributes, hooks."""


def test_two_remedies_in_any_order_of_undoing() -> None:
    """Undone the first first: the same as the second alone, or refused in one line."""
    refused = []
    for first, second in permutations(PAIRS, 2):
        model, optimizer = prepared(first, "lab")
        undo = made(first, model, optimizer).apply(model, optimizer)
        again = made(second, model, optimizer).apply(model, optimizer)
        try:
            undo()
        except InputError as error:
            assert "\n" not in str(error) and f"{second} was applied" in str(error)
            refused.append({first, second})
            again()
            undo()
        else:
            alone, other = prepared(second, "lab")
            made(second, alone, other).apply(alone, other)
            if "roll_back" not in (first, second):
                assert torch.equal(logits(model), logits(alone)), (first, second)
            again()
        fresh = prepared(first, "lab")
        here, there = state(model, optimizer), state(*fresh)
        for part in ("tensors", "attributes", "hooks", "groups", "step hooks"):
            assert not differences(there[part], here[part], f"{first} {second}")
    assert {"roll_back", "sigma_reparam"} in refused
    assert {"temperature", "qk_norm"} not in refused
    assert len(refused) < len(PAIRS) * (len(PAIRS) - 1) / 2


def test_a_deep_copy_has_its_own_remedy() -> None:
    for name in ("qk_norm", "sigma_reparam", "soft_cap", "keep_fp32", "residual_scale"):
        for family in ("llama", "torch"):
            model, _, undo = applied(name, family)
            twin = copy.deepcopy(model)
            answers = logits(model).detach()
            # σ of the copy is followed anew, and rounds otherwise.
            torch.testing.assert_close(logits(twin), answers, rtol=0, atol=1e-5)
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.add_(0.1)
            assert torch.equal(logits(model), answers)
            undo()


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("learning_rte", {}, "nearest is learning_rate"),
    ("learning_rate", {"factor": 2}, "no option factor"),
    ("learning_rate", {"scale": 0.0}, "positive"),
    ("beta2", {"beta2": 1.0}, "β₂ lies"),
    ("gradient_clip", {"limit": -1.0}, "positive"),
    ("adaptive_clip", {"share": 0.0}, "positive"),
    ("spike_handling", {"ratio": 0.0}, "positive"),
    ("skip_step", {"times": 0.0}, "positive"),
    ("update_clip", {"ratio": 0.0}, "positive"),
    ("qk_clip", {"limit": 0.0}, "positive"),
    ("qk_norm", {"steps": 0}, "at least 1 step"),
    ("soft_cap", {"cap": 0.0}, "positive"),
    ("z_loss", {"weight": 0.0}, "positive"),
    ("residual_scale", {"scale": 0.0}, "scale of residual_scale must be positive"),
    ("residual_scale", {"steps": -1}, "must be 0 or more"),
    ("keep_fp32", {"narrow": torch.float64}, "bfloat16 or float16"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSALS)
def test_options_without_sense_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as found:
        remedy(name, **options)
    assert "\n" not in str(found.value)


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("qk_norm", {}, "no attention we know"),
    ("sigma_reparam", {}, "no attention we know"),
    ("soft_cap", {}, "no attention we know"),
    ("head_temperature", {}, "no attention we know"),
    ("qk_clip", {}, "no attention we know"),
    ("temperature", {}, "has no attention"),
    ("normaliser", {"to": "sink"}, "no attention we know"),
    ("residual_scale", {}, "blocks of Linear are not known"),
    ("deepnorm_init", {}, "blocks of Linear are not known"),
    ("path_init", {}, "blocks of Linear are not known"),
    ("router_balance", {}, "no router we know"),
    ("layer_norm_epsilon", {}, "no norm with an ε"),
    ("roll_back", {}, "needs a checkpoint"),
    ("roll_back", {"checkpoint": "nowhere.pt"}, "no such checkpoint"),
    ("roll_back", {"checkpoint": {"model": {}, "optimizer": {}}}, "not of this model"),
    ("keep_fp32", {"modules": ("head",)}, "no module called head"),
    ("group_learning_rates", {}, "taken a step"),
    ("group_learning_rates", {"curvature": {"a": 1.0}}, "no module called a"),
    ("beta2", {}, "SGD has no β₂"),
]


@pytest.mark.parametrize(("name", "options", "message"), UNFIT)
def test_a_model_it_does_not_fit_is_refused_and_left_alone(
    name: str, options: dict[str, Any], message: str
) -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters())
    before = state(model, optimizer)
    with pytest.raises(InputError, match=message) as found:
        remedy(name, **options).apply(model, optimizer)
    assert "\n" not in str(found.value)
    assert not differences(before, state(model, optimizer))


def test_a_checkpoint_that_fits_in_part_leaves_nothing_of_itself() -> None:
    model, optimizer = prepared("roll_back", "lab")
    given = snapshot(model, optimizer)
    given["model"] = {n: x + 1 for n, x in given["model"].items()}
    given["optimizer"]["param_groups"].pop()
    before = state(model, optimizer)
    with pytest.raises(InputError, match="not of this model and optimiser"):
        remedy("roll_back", checkpoint=given).apply(model, optimizer)
    assert not differences(before["tensors"], state(model, optimizer)["tensors"])


def test_what_needs_the_optimiser_says_how_to_give_it() -> None:
    model = a_model("lab")
    for name in ("learning_rate", "skip_step", "qk_norm", "sigma_reparam"):
        with pytest.raises(InputError, match=r"apply\(model, optimizer\)"):
            remedy(name).apply(model)
    with pytest.raises(InputError, match="LBFGS"):
        lbfgs = torch.optim.LBFGS(model.parameters())
        remedy("gradient_clip").apply(model, lbfgs)
    trained, optimizer = prepared("qk_norm", "lab")
    with pytest.raises(InputError, match="before training"):
        remedy("deepnorm_init").apply(trained, optimizer)
    compiled = type("OptimizedModule", (nn.Module,), {})()
    with pytest.raises(InputError, match="compiled"):
        remedy("z_loss").apply(compiled, optimizer)
    normed = a_model("lab", qk_norm=True)
    for name in ("qk_norm", "qk_clip", "head_temperature"):
        with pytest.raises(InputError, match="normalises queries and keys already"):
            remedy(name).apply(normed, an_optimizer(normed))
    shared = a_model("lab", attention="shared")
    with pytest.raises(InputError, match="one and the same map"):
        remedy("qk_norm").apply(shared, an_optimizer(shared))
    assert not any(m._forward_hooks for m in shared.modules())
