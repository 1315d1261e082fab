"""Models that are called part by part: the window opens at what runs first."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from equipoise.watching import Watch
from tests.watching.models import TOKENS, TinyBlock, TinyModel, batches, hooks_on

SITES = {f"parts.blocks.{i}.attention" for i in (0, 1)}


class Parts(nn.Module):
    """No forward: a training step calls embedding, blocks and head itself."""

    def __init__(self) -> None:
        super().__init__()
        inner = TinyModel()
        self.parts = nn.ModuleDict(
            {"embedding": inner.embedding, "blocks": inner.blocks, "head": inner.head}
        )

    def training_step(self, tokens: Tensor) -> Tensor:
        x = self.parts["embedding"](tokens[:, :-1])
        for block in self.parts["blocks"]:
            x = block(x)
        return _loss(self.parts["head"](x), tokens)

    def forward_step(self, tokens: Tensor) -> Tensor:
        """Blocks and their attention called as ``.forward()``, without a hook."""
        x = self.parts["embedding"](tokens[:, :-1])
        for block in self.parts["blocks"]:
            x = _block_by_forward(block, x)
        return _loss(self.parts["head"](x), tokens)


def _block_by_forward(block: TinyBlock, x: Tensor) -> Tensor:
    attention, block.attention = block.attention, _Forwarded(block.attention)
    try:
        return block.forward(x)
    finally:
        block.attention = attention


class _Forwarded(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.__dict__["inner"] = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.__dict__["inner"].forward(x)
        return out


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    path: Path | None, way: str, *, steps: int = 4
) -> tuple[list[float], Parts, Watch | None]:
    torch.manual_seed(0)
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = None
    if path is not None:
        handle = equipoise.watch(model, optimizer, run=path / "a.eqp", every=1)
    losses = []
    step: Callable[[Tensor], Tensor] = getattr(model, way)
    for batch in batches(steps):
        loss = step(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, handle


@pytest.mark.parametrize("way", ["training_step", "forward_step"])
def test_attention_is_read_and_training_unchanged(way: str, tmp_path: Path) -> None:
    alone, plain, _ = train(None, way)
    losses, model, handle = train(tmp_path, way)
    assert handle is not None
    handle.close()
    assert losses == alone and hooks_on(model) == 0
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
    run = equipoise.open_run(handle.path)
    theta = run.series("attention.theta.p50")
    assert set(theta) == SITES
    assert all(list(steps) == [0, 1, 2, 3] for steps, _ in theta.values())
    if way == "training_step":
        assert set(run.series("residual.B")) == {"parts.blocks.0", "parts.blocks.1"}
    found, *blocks = handle.findings
    assert found.code == "watch.unread.part_by_part"
    # Blocks that run as .forward() have no call to hook: what needs it is named.
    named = [f.site for f in blocks if f.code == "watch.unread.inline"]
    assert named == ([] if way == "training_step" else ["parts.blocks.0"])


def test_beside_compiled_code_forward_calls_are_named_as_unread(
    tmp_path: Path,
) -> None:
    """Compiled code may run between the parts; it must not meet our function mode."""
    torch.compile(nn.ReLU(), backend="eager")(torch.ones(1))
    losses, _, handle = train(tmp_path, "forward_step")
    assert handle is not None
    handle.close()
    assert losses == train(None, "forward_step")[0]
    assert "watch.unread.by_forward" in [f.code for f in handle.findings]
    assert "attention.theta.p50" not in equipoise.open_run(handle.path).quantities


def test_readings_are_those_of_the_called_model(tmp_path: Path) -> None:
    """Called as a model or part by part, the readings are the same numbers."""

    class Called(Parts):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.training_step(tokens)

    torch.manual_seed(0)
    model = Called()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with equipoise.watch(model, optimizer, run=tmp_path / "b.eqp", every=1) as whole:
        for batch in batches(4):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    _, _, handle = train(tmp_path, "training_step")
    assert handle is not None
    handle.close()
    run, other = equipoise.open_run(handle.path), equipoise.open_run(whole.path)
    # What the model as a whole is given and returns is not seen of its parts.
    skipped = {"output.logit_max", "output.logit_norm", "loop.batch_size"}
    assert set(other.quantities) - set(run.quantities) <= skipped
    for quantity in ("attention.theta.mean", "residual.kurtosis", "norm.sigma.min"):
        for site, (_, values) in other.series(quantity).items():
            assert run.series(quantity)[site][1].tolist() == values.tolist()


def test_a_second_micro_batch_is_not_read_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1) as handle:
        for batch in batches(2):
            for _ in range(3):
                model.training_step(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert set(equipoise.open_run(handle.path).series("attention.entropy")) == SITES


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_made_while_a_step_waits_can_be_compiled_and_scripted(
    make: Any, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, TOKENS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4)
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1) as handle:
        assert handle.sampling
        copied = make(model)
    assert hooks_on(copied) == 0
    torch._dynamo.reset()
    compiled = torch.compile(copied, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), model(x))
    assert torch.equal(torch.jit.script(copied)(x), model(x))
    torch._dynamo.reset()


class Dictionaries(nn.Module):
    """Blocks are ModuleDicts, which cannot be called: the model calls their parts."""

    def __init__(self) -> None:
        super().__init__()
        names = ("q", "k", "v", "o")
        self.embedding, self.head = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(8, 8) for name in names}) for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            q, k, v = (block[n](x).unflatten(-1, (2, 4)).transpose(1, 2) for n in "qkv")
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["o"](y.transpose(1, 2).flatten(-2))
        logits: Tensor = self.head(x)
        return logits


def test_a_block_that_cannot_be_called_is_no_gap(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Dictionaries()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tmp_path / "a.eqp"
    with equipoise.watch(model, optimizer, run=run, every=1, quiet=True) as handle:
        for _ in range(2):
            tokens = torch.randint(0, TOKENS, (2, 6))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "attention.theta.p50" in equipoise.open_run(run).quantities
    # Its attention is read; what needs a call of the block is named, not warned of.
    assert sorted((f.code, f.severity) for f in handle.findings) == [
        ("watch.unread.inline", "info"),
        ("watch.unread.projections_unknown", "info"),
    ]
