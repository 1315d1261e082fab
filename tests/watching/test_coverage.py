"""What was not read is a finding; with strict=True an exception."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from equipoise.anatomy.discovery import anatomy_of
from equipoise.errors import SilentSiteError
from equipoise.watching.step.coverage import CoverageCheck
from tests.watching.models import (
    TOKENS,
    TinyAttention,
    TinyModel,
    batches,
    declared,
    hooks_on,
    objective,
)


class SkipsAttention(TinyAttention):
    """Attention by means nobody could intercept."""

    skips = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.skips:
            return super().forward(x)
        out: Tensor = self.o_proj(self.v_proj(x))
        return out


class Skipping(TinyModel):
    """LayerDrop: the second block runs only when asked to."""

    skips = True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens))
        x = x if self.skips else self.blocks[1](x)
        out: Tensor = self.head(x)
        return out


def model_that_skips_attention(
    *, from_the_start: bool
) -> tuple[TinyModel, SkipsAttention]:
    model = TinyModel()
    site = SkipsAttention()
    site.skips = from_the_start
    model.blocks[1].attention = site
    return model, site


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    objective(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


NOT_READ = r"blocks\.1\.attention.*1 of 2.*softmax"


def test_a_declared_site_without_attention_is_a_warning(tmp_path: Path) -> None:
    model, _ = model_that_skips_attention(from_the_start=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with declared("TinyAttention", "SkipsAttention"):
        handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp")
    step(model, optimizer, batches(1)[0])
    handle.close()
    (found,) = handle.findings
    assert (found.severity, found.code) == ("warn", "watch.silent.sites")
    assert (found.params["count"], found.params["declared"]) == (1, 2)
    assert hooks_on(model) == 0


def test_a_declared_site_without_attention_raises_if_strict(tmp_path: Path) -> None:
    model, _ = model_that_skips_attention(from_the_start=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with declared("TinyAttention", "SkipsAttention"):
        handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", strict=True)
    with pytest.raises(SilentSiteError, match=NOT_READ):
        step(model, optimizer, batches(1)[0])
    handle.close()
    assert hooks_on(model) == 0


def test_a_guessed_site_without_attention_is_no_error(tmp_path: Path) -> None:
    model, _ = model_that_skips_attention(from_the_start=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1) as handle:
        for batch in batches(2):
            step(model, optimizer, batch)
    (found,) = handle.findings
    assert (found.severity, found.code) == ("warn", "watch.unread.unknown_attention")
    assert found.site == "blocks.1.attention"


def test_a_model_without_attention_is_reported_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1) as handle:
        for _ in range(2):
            model(torch.randn(2, 4)).pow(2).mean().backward()
            optimizer.step()
    (found,) = [f for f in handle.findings if f.belongs_to("watch")]
    assert (found.severity, found.site) == ("info", "")
    assert found.code == "watch.unread.no_attention"
    assert {"loss", "gradient.norm"} <= {*equipoise.open_run(handle.path).quantities}


def test_a_pass_that_raised_is_not_reported_as_unread(tmp_path: Path) -> None:
    """A loop that runs out of memory and tries again with less is not blamed."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failing = model.blocks[1].attention.v_proj.register_forward_hook(_out_of_memory)
    with declared():
        handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1)
    with pytest.raises(MemoryError):
        objective(model, batches(1)[0])
    failing.remove()
    for batch in batches(2):
        step(model, optimizer, batch)
    handle.close()
    series = equipoise.open_run(handle.path).series("attention.entropy")
    assert not handle.findings and list(series["blocks.1.attention"][0]) == [1]


def _out_of_memory(*_: object) -> None:
    raise MemoryError


def test_a_site_that_did_not_run_is_not_reported(tmp_path: Path) -> None:
    model = Skipping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with declared():
        handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1)
    for i, batch in enumerate(batches(4)):
        model.skips = i != 2
        step(model, optimizer, batch)
    handle.close()
    series = equipoise.open_run(handle.path).series("attention.entropy")
    assert list(series["blocks.0.attention"][0]) == [0, 1, 2, 3]
    assert list(series["blocks.1.attention"][0]) == [2]
    assert not handle.findings


def test_a_site_that_stops_being_read_is_one_finding(tmp_path: Path) -> None:
    model, site = model_that_skips_attention(from_the_start=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with declared("TinyAttention", "SkipsAttention"):
        handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1)
    for i, batch in enumerate(batches(5)):
        site.skips = i >= 2
        step(model, optimizer, batch)
    handle.close()
    (found,) = equipoise.open_run(handle.path).findings
    assert (found.code, found.site) == ("watch.silent.sites", "blocks.1.attention")


def test_a_loss_that_is_partial_was_seen() -> None:
    """Steps without a backward pass after it do not say that no loss ever was."""
    check, loss = CoverageCheck(anatomy_of(TinyModel())), torch.ones(())
    (found,) = check.check_loss(0, loss, "replaced")
    assert found.severity == "info" and not check.check_loss(1, loss, "replaced")
    assert not check.check_loss(2, None, "") and not check.check_loss(3, None, "")


def test_a_step_without_a_forward_pass_is_not_reported(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with declared():
        handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1)
    optimizer.step()
    loss = objective(model, batches(1)[0])
    loss.backward()
    optimizer.step()
    handle.close()
    assert not handle.findings


class Attributes(nn.Module):
    """Blocks in no list, norms that are functions, and an output that is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS)
        self.lower, self.upper = TinyAttention(), TinyAttention()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for attention in (self.lower, self.upper):
            x = x + attention(F.layer_norm(x, (16,)))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def test_a_family_of_readings_that_never_comes_is_named_with_its_cause(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, path = Attributes(), tmp_path / "a.eqp"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with equipoise.watch(model, run=path, every=1, quiet=True) as handle:
        for batch in batches(4):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.step(loss=loss)
    assert {f.severity for f in handle.findings} == {"info"}
    reasons = ("no_blocks", "no_updates")
    assert sorted(f.code for f in handle.findings) == [
        f"watch.unread.{reason}" for reason in reasons
    ]
    quantities = equipoise.open_run(path).quantities
    assert {"attention.theta.p50", "projection.G", "gradient.norm"} <= {*quantities}
    assert any(quantity.startswith("norm.") for quantity in quantities)


@dataclass
class State:
    tokens: Tensor
    hidden: Tensor


class PassesStates(TinyModel):
    """Blocks hand a tuple, a dictionary or a dataclass on; a dictionary comes out."""

    def __init__(self, held: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.held = held
        for block in self.blocks:
            block.register_forward_pre_hook(lambda block, args: _hidden(args[0]))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(self.held(tokens, x))
        logits = self.head(x)
        return {"features": x, "logits": logits}


def _hidden(given: Any) -> Tensor:
    if isinstance(given, State):
        return given.hidden
    hidden: Tensor = given["hidden"] if isinstance(given, dict) else given[1]
    return hidden


WAYS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda tokens, x: (tokens, x),
    lambda tokens, x: {"tokens": tokens, "hidden": x},
    State,
]


@pytest.mark.parametrize("held", WAYS)
def test_hidden_states_inside_what_blocks_are_given_are_read(
    held: Callable[[Tensor, Tensor], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, path = PassesStates(held), tmp_path / "a.eqp"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with equipoise.watch(model, optimizer, run=path, every=1, quiet=True) as handle:
        for batch in batches(3):
            logits = model(batch[:, :-1])["logits"]
            F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    largest = logits.detach().abs().max().item()
    assert not handle.findings
    run = equipoise.open_run(path)
    assert {*run.series("residual.B")} == {"blocks.0", "blocks.1"}
    assert run.series("output.logit_max")[""][1][-1] == pytest.approx(largest)


class LeavesAttention(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
        own = isinstance(m, TinyAttention)
        return own or super().is_leaf_module(m, qualified_name)


def test_blocks_of_a_traced_graph_are_named_and_their_gradients_read(
    tmp_path: Path,
) -> None:
    """In a GraphModule containers are plain modules, and no block is called."""
    torch.manual_seed(0)
    inner = TinyModel()
    model = torch.fx.GraphModule(inner, LeavesAttention().trace(inner))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "a.eqp"
    with equipoise.watch(model, optimizer, run=path, every=1, quiet=True) as handle:
        for batch in batches(3):
            step(model, optimizer, batch)
    (found,) = handle.findings
    assert (found.site, found.params["sites"]) == ("blocks.0", 2)
    assert found.code == "watch.unread.inline"
    run = equipoise.open_run(path)
    blocks = {"blocks.0", "blocks.1"}
    assert blocks < {*run.series("gradient.norm")} & {*run.series("update.norm")}
    assert {*run.series("attention.B")} == {f"{name}.attention" for name in blocks}
