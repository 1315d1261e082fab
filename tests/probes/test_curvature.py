"""Sharpness while training: the right loss, the right number, and no trace."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from equipoise.auditing.curvature import edge_of_stability, hessian
from equipoise.probes.curvature import Sharpness
from equipoise.probes.stored_batch import recover_cross_entropy, store_batch
from tests.watching.models import (
    TOKENS,
    TinyModel,
    batches,
    identical,
    objective,
    trained,
)


def logits(dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return (3 * torch.randn(4, 3, 7, generator=rng)).to(dtype).requires_grad_()


TARGETS = torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(1))


def entropy(z: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), TARGETS.flatten(), **options)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_cross_entropy_is_recovered_from_its_gradient(dtype: torch.dtype) -> None:
    z = logits(dtype)
    (g,) = torch.autograd.grad(entropy(z), z)
    found = recover_cross_entropy(z, g)
    assert found is not None and torch.equal(found.target_R, TARGETS.flatten())
    assert torch.allclose(found.weight_R, torch.full((12,), 1 / 12), rtol=0.02)


def test_weights_masks_sums_and_factors() -> None:
    z, ignored = logits(), TARGETS.clone()
    ignored[1] = -100
    loss = F.cross_entropy(z.flatten(0, 1), ignored.flatten()) * 1024 / 3
    found = recover_cross_entropy(z, torch.autograd.grad(loss, z)[0])
    assert found is not None and found.weight_R[3:6].eq(0).all()
    kept = store_batch((torch.zeros(4, 2),), {}, found, at_most=2)
    assert kept.entropy is not None
    assert kept.entropy.weight_R.tolist() == pytest.approx([1 / 3] * 3 + [0] * 3)
    whole = recover_cross_entropy(
        z, torch.autograd.grad(entropy(z, reduction="sum"), z)[0]
    )
    summed = store_batch((torch.zeros(4, 2),), {}, whole, at_most=4)
    assert summed.entropy is not None
    assert torch.allclose(summed.entropy.weight_R, torch.ones(12), atol=1e-4)


@pytest.mark.parametrize("name", ["smooth", "squares", "flat", "focal"])
def test_other_losses_are_not_mistaken_for_it(name: str) -> None:
    z = logits()
    p = z.flatten(0, 1).softmax(-1).gather(1, TARGETS.view(-1, 1))
    losses = {
        "smooth": entropy(z, label_smoothing=0.5),
        "squares": (z**2).mean(),
        "flat": z.sum() * 0,
        "focal": (torch.logsumexp(z, -1) ** 2).mean() + p.mean() * 0,
    }
    assert recover_cross_entropy(z, torch.autograd.grad(losses[name], z)[0]) is None


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_the_reading_is_the_sharpness_of_the_stored_batch(
    kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = TinyModel(dropout=0.1)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-2)
        if kind == "adam"
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    probe = Sharpness(every=2, search=equipoise_search())
    first, *rest = batches(3)
    with equipoise.watch(
        model, optimizer, run=tmp_path / "a.eqp", every=1, probes=[probe], strict=True
    ) as watched:
        for batch in (first, *rest):
            objective(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    truth = edge_of_stability(
        model, (first[:, :-1], first[:, 1:]), optimizer, search=equipoise_search()
    )
    run = equipoise.open_run(watched.path)
    name = "preconditioned_sharpness" if kind == "adam" else "sharpness"
    steps, values = run.series(f"curvature.{name}")[""]
    assert list(steps) == [0, 2]  # every second sample, from the first
    assert values[-1] == pytest.approx(truth.value.value, rel=1e-3)
    ratio = run.series("curvature.edge_ratio")[""][1][-1]
    assert ratio == pytest.approx(truth.ratio, rel=1e-3)
    assert run.series("curvature.error")[""][1][-1] < 1e-3


def equipoise_search() -> Any:
    from equipoise.numerics.spectra.estimate import Search

    return Search(tolerance=1e-4, at_most=300)


def test_a_warm_start_finds_it_sooner(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    probe = Sharpness(every=1)
    with equipoise.watch(
        model, optimizer, run=tmp_path / "a.eqp", every=1, probes=[probe], strict=True
    ) as watched:
        for batch in batches(4):
            objective(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    errors = equipoise.open_run(watched.path).series("curvature.error")[""][1]
    assert max(errors[1:]) <= 0.05


CASES: dict[str, dict[str, Any]] = {
    "dropout": {"make": partial(TinyModel, dropout=0.2)},
    "bf16": {"make": partial(TinyModel, dropout=0.1), "autocast": True},
    "accumulation": {"make": partial(TinyModel, dropout=0.1), "micro": 3},
    "scaled": {"make": TinyModel, "autocast": True, "scale": 2.0**10},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_is_bit_identical(case: dict[str, Any], tmp_path: Path) -> None:
    alone, _ = trained(**case, steps=6)
    probes = [Sharpness(every=1)]
    watched, handle = trained(
        **case, steps=6, run=tmp_path / "a.eqp", probes=probes, every=2
    )
    assert identical(alone, watched) and handle is not None
    run = equipoise.open_run(handle.path)
    values = run.series("curvature.preconditioned_sharpness")[""][1]
    assert len(values) == 3 and all(math.isfinite(v) and v > 0 for v in values)


class OwnLoss(nn.Module):
    """A model that returns its loss, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyModel()

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        from types import SimpleNamespace

        z = self.inner(tokens)
        smooth = F.cross_entropy(z.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return SimpleNamespace(loss=smooth, logits=z)


def test_a_loss_of_the_models_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = OwnLoss()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    probe = Sharpness(search=equipoise_search())
    (batch,) = batches(1)
    with equipoise.watch(
        model, optimizer, run=tmp_path / "a.eqp", every=1, probes=[probe], strict=True
    ) as watched:
        model(batch[:, :-1], labels=batch[:, 1:]).loss.backward()
        optimizer.step()
    run = equipoise.open_run(watched.path)
    # RMSprop's edge is not known: plain sharpness, no ratio.
    assert "curvature.edge_ratio" not in run.quantities
    operator = hessian(model, {"tokens": batch[:, :-1], "labels": batch[:, 1:]})
    v_N = probe._start
    assert v_N is not None
    value = run.series("curvature.sharpness")[""][1][0]
    assert float((operator(v_N) - value * v_N).norm()) <= 1e-3 * abs(value)


def test_unknown_losses_and_large_models_are_not_read(tmp_path: Path) -> None:
    for probe, loss in (
        (Sharpness(), lambda z: (z**2).mean()),
        (Sharpness(largest=10), lambda z: z.flatten(0, 1).log_softmax(-1)[:, 0].mean()),
    ):
        torch.manual_seed(0)
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = tmp_path / f"{probe.largest}.eqp"
        with equipoise.watch(
            model, optimizer, run=run, every=1, probes=[probe], strict=True
        ) as watched:
            loss(model(torch.randint(0, TOKENS, (2, 6)))).backward()
            optimizer.step()
        assert not any(
            "curvature" in q for q in equipoise.open_run(watched.path).quantities
        )
