"""What is recorded is what happened: losses, norms, scales, several models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from equipoise.anatomy.families import FAMILIES, Fused, family
from equipoise.errors import InputError
from tests.watching.models import (
    WIDTH,
    TinyBlock,
    TinyModel,
    batches,
    declared,
    objective,
    trained,
)


def norm_of(parameters: list[nn.Parameter]) -> float:
    grads = [p.grad.flatten() for p in parameters if p.grad is not None]
    return torch.cat(grads).norm().item()


@pytest.mark.parametrize("scaled", [False, True])
def test_losses_and_gradients_are_the_loops_own(tmp_path: Path, scaled: bool) -> None:
    """With accumulation and a GradScaler: everything is recorded unscaled."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
    losses, norms, heads = [], [], []
    with equipoise.watch(
        model, optimizer, run=tmp_path / "a.eqp", every=1, strict=True
    ) as handle:
        for batch in batches(4):
            total = 0.0
            for _ in range(2):
                loss = objective(model, batch) / 2
                scaler.scale(loss).backward()
                total += loss.item()
            scaler.unscale_(optimizer)
            heads.append(norm_of(list(model.head.parameters())))
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(total)
    run = equipoise.open_run(handle.path)
    for quantity, site, expected in (
        ("loss", "", losses),
        ("gradient.norm.total", "", norms),
        ("gradient.norm", "head", heads),
    ):
        steps, values = run.series(quantity)[site]
        assert list(steps) == [0, 1, 2, 3]
        torch.testing.assert_close(
            torch.tensor(values), torch.tensor(expected).double()
        )


class Packed(nn.Module):
    """One weight for queries, keys and values, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 2
        self.c_attn, self.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(1, 2)
            for part in self.c_attn(x).split(8, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_the_gradient_of_queries_and_keys(tmp_path: Path) -> None:
    """Of their rows of a packed weight, and of one map where the other is frozen."""
    packed, apart = Packed(), TinyModel(depth=1)
    attention = apart.blocks[0].attention
    attention.k_proj.requires_grad_(False)
    family("Packed")(lambda: Fused(qkv="c_attn", o="c_proj"))
    x = torch.randn(2, 5, 8)
    passes = (
        (packed, lambda: packed(x).square().sum()),
        (
            apart,
            lambda: objective(apart, batches(1)[0]),
        ),
    )
    found = []
    with declared():
        for model, loss in passes:
            run = tmp_path / f"{len(found)}.eqp"
            with equipoise.watch(model, run=run, every=1, strict=True) as handle:
                loss().backward()
                handle.step()
            ((_, values),) = equipoise.open_run(run).series("gradient.qk").values()
            found.append(float(values.ravel()[0]))
    FAMILIES.pop("Packed")
    rows, queries = packed.c_attn.weight.grad, attention.q_proj.weight.grad
    assert rows is not None and queries is not None
    expected = [rows[:16].norm().item(), queries.norm().item()]
    assert found == pytest.approx(expected, rel=1e-5)  # float32, another order of sums


def test_a_step_the_scaler_skips_is_still_a_step(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1) as handle:
        for batch in batches(3):
            scaler.scale(objective(model, batch) * 100).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert handle.current_step == 3
    assert len(equipoise.open_run(handle.path).series("loss")[""][0]) == 3


def test_two_models_keep_their_losses_apart(tmp_path: Path) -> None:
    models = [TinyModel(), TinyModel()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    handles = [
        equipoise.watch(m, o, run=tmp_path / f"{i}.eqp", every=2)
        for i, (m, o) in enumerate(zip(models, optimizers, strict=True))
    ]
    printed: list[list[float]] = [[], []]
    for batch in batches(4):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss = objective(model, batch) * (i + 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            printed[i].append(loss.item())
    for i, handle in enumerate(handles):
        handle.close()
        _, values = equipoise.open_run(handle.path).series("loss")[""]
        assert list(values) == printed[i]


def test_frozen_and_shared_parameters(tmp_path: Path) -> None:
    class Tied(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.embedding.weight
            self.blocks[1] = self.blocks[0]
            self.blocks[0].norm_1.requires_grad_(False)

    _, handle = trained(Tied, run=tmp_path / "a.eqp", steps=4)
    assert handle is not None
    run = equipoise.open_run(handle.path)
    entropy = run.series("attention.entropy")
    assert set(entropy) == {"blocks.0.attention", "blocks.0.attention#1"}
    assert "gradient.norm" in run.quantities and not run.findings


def test_without_an_optimiser_step_ends_the_step(tmp_path: Path) -> None:
    model = TinyModel()
    with equipoise.watch(model, run=tmp_path / "a.eqp", every=2) as handle:
        for i, batch in enumerate(batches(4)):
            with torch.no_grad():
                objective(model, batch)
            handle.step(loss=float(i), accuracy=0.5)
    run = equipoise.open_run(handle.path)
    assert list(run.series("loss")[""][1]) == [0.0, 1.0, 2.0, 3.0]
    assert list(run.series("attention.entropy")["blocks.0.attention"][0]) == [0, 2]
    assert list(run.series("accuracy")[""][1]) == [0.5] * 4


def test_a_given_tensor_is_recorded_as_it_was_when_it_was_given(tmp_path: Path) -> None:
    """Loops add to one tensor and clear it."""
    total = torch.zeros(1)
    with equipoise.watch(TinyModel(), run=tmp_path / "a.eqp") as handle:
        for i in range(3):
            handle.step(loss=total.add_(i), count=torch.tensor(i))
            total.zero_()
    run = equipoise.open_run(handle.path)
    for name in ("loss", "count"):
        assert list(run.series(name)[""][1]) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "value", [torch.ones(3), torch.ones(0), torch.ones((), dtype=torch.cfloat), "x", 1j]
)
def test_what_is_not_one_real_number_is_refused(value: Any, tmp_path: Path) -> None:
    with equipoise.watch(TinyModel(), run=tmp_path / "a.eqp") as handle:
        handle.step(loss=1.0)
        with pytest.raises(InputError, match=r"accuracy.* is not one real number"):
            handle.step(accuracy=value)
        handle.step(loss=2.0)
    assert list(equipoise.open_run(handle.path).series("loss")[""][1]) == [1.0, 2.0]


def test_scalars_join_the_step_that_has_just_ended(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    ended: list[tuple[int, bool]] = []
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=2) as handle:
        handle.on_step_end(lambda step, sampled: ended.append((step, sampled)))
        for i, batch in enumerate(batches(3)):
            objective(model, batch).backward()
            optimizer.step()
            handle.step(extra=float(i))
    run = equipoise.open_run(handle.path)
    steps, values = run.series("extra")[""]
    assert (list(steps), list(values)) == ([0, 1, 2], [0.0, 1.0, 2.0])
    assert list(run.series("learning_rate")[""][1]) == [0.25] * 3
    assert ended == [(0, True), (1, False), (2, True)]
    written = [reading.quantity for reading in run.since(0)[0].readings]
    assert written.count("extra") == 3, "each is written once"


def test_findings_and_readings_reach_callback_and_sinks(tmp_path: Path) -> None:
    received: list[tuple[dict[str, float], int]] = []
    found: list[equipoise.Finding] = []

    class Ear:
        def log(self, values: dict[str, float], step: int) -> None:
            received.append((values, step))

    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with equipoise.watch(
        model,
        optimizer,
        run=tmp_path / "a.eqp",
        sinks=[Ear()],
        on_finding=found.append,
        every=1,
    ) as handle:
        for i, batch in enumerate(batches(3)):
            loss = objective(model, batch)
            (loss * float("inf") if i == 1 else loss).backward()
            optimizer.step()
    assert [step for _, step in received] == [0, 1, 2]
    assert "loss" in received[0][0] and "gradient.norm/head" in received[0][0]
    assert tuple(found) == handle.findings and found[0].step == 1
    written = [f.to_json() for f in equipoise.open_run(handle.path).findings]
    assert sorted(written) == sorted(f.to_json() for f in found), "each is there once"


def test_a_padded_batch_through_a_torch_layer(tmp_path: Path) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.embedding = nn.Embedding(11, 16)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.encoder(F.dropout(self.embedding(tokens), 0.1))
            logits: Tensor = self.head(hidden)
            return logits

    _, handle = trained(Encoder, run=tmp_path / "a.eqp", steps=4)
    assert handle is not None
    assert len(equipoise.open_run(handle.path).series("attention.entropy")) == 2


def test_a_block_alone_is_a_model_too(tmp_path: Path) -> None:
    model = TinyBlock()
    with equipoise.watch(model, run=tmp_path / "a.eqp", every=1) as handle:
        model(torch.randn(2, 5, 16)).sum().backward()
        handle.step()
    assert "attention.entropy" in equipoise.open_run(handle.path).quantities


class Shared(nn.Module):
    """One layer, three passes, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TinyBlock()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = 3 * self.blocks[0](x)
        out: Tensor = self.head(x)
        return out


def test_every_pass_of_a_shared_layer_has_its_own_B(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 5, WIDTH)
    with (
        declared(),
        equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1) as handle,
    ):
        model(x).square().mean().backward()
        optimizer.step()
    expected = []
    with torch.no_grad():
        torch.manual_seed(0)
        fresh = Shared()
        for _ in range(3):
            expected.append(float(x.norm(dim=-1).amax()))
            x = 3 * fresh.blocks[0](x)
    run = equipoise.open_run(handle.path)
    found = run.series("residual.B")
    names = ["blocks.0", "blocks.0#1", "blocks.0#2"]
    assert [float(found[name][1][0]) for name in names] == pytest.approx(expected)
    sites = {f"blocks.0.attention{number}" for number in ("", "#1", "#2")}
    for quantity in ("attention.B", "sensitivity.S", "sensitivity.S_residual"):
        assert {*run.series(quantity)} == sites
    S = run.series("sensitivity.S_residual")
    assert len({float(values[0]) for _, values in S.values()}) == 3
