"""What was not read is a finding; with strict=True an exception."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equipoise
from equipoise.errors import SilentSiteError
from tests.watching.models import (
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
    assert (found.severity, found.rule) == ("warn", "watch.silent")
    assert re.search(NOT_READ, found.message) and hooks_on(model) == 0


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
    assert (found.severity, found.rule) == ("warn", "watch.unread")
    assert found.site == "blocks.1.attention" and "linear" in found.message


def test_a_model_without_attention_is_reported_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1) as handle:
        for _ in range(2):
            model(torch.randn(2, 4)).pow(2).mean().backward()
            optimizer.step()
    (found,) = handle.findings
    assert (found.severity, found.site) == (
        "info",
        "",
    ) and "no attention" in found.message
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
    assert (found.rule, found.site) == ("watch.silent", "blocks.1.attention")


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
