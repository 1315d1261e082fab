"""Which modules mix tokens without softmax, and which only look like it."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.mixers import mixers
from equipoise.records import Finding
from equipoise.text.card import worded
from equipoise.text.verdict_text import worded as worded_verdict
from equipoise.watching.handle import Watch
from tests.judging.histories import healthy, judged

WIDTH = 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


class StateSpace(nn.Module):
    """Known by a parameter that only recurrences have; the class name says nothing."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(WIDTH))
        self.into, self.out = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        decay = torch.exp(-torch.exp(self.A_log))
        state, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = decay * state + x[:, t]
            found.append(state)
        return self.out(self.into(torch.stack(found, 1)))


class Averager(nn.Module):
    """Known only because nothing else of its block can mix tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        return self.out(self.into(x).cumsum(1) / count)


class ConvMLP(nn.Module):
    """A feed-forward net with a convolution in it, as some vision models have."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.fc(x).mT).mT


class GatedLayer(nn.Module):
    def __init__(self, mix: nn.Module, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.ln_1, self.mix = nn.LayerNorm(WIDTH), mix
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = mlp or nn.Sequential(
            nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    def __init__(self, *mixing: nn.Module, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(GatedLayer(one, mlp) for one in mixing)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def found(model: nn.Module) -> list[str]:
    return list(mixers(anatomy_of(model)))


def test_a_mixer_is_found_by_its_parts_or_because_it_must_be_one() -> None:
    assert found(Model(Attention(), StateSpace())) == ["layers.1.mix"]
    assert found(Model(Attention(), Averager(), Attention())) == ["layers.1.mix"]
    assert found(Model(Attention(), nn.GRU(WIDTH, WIDTH))) == ["layers.1.mix"]


def test_what_treats_each_token_alone_is_no_mixer() -> None:
    assert found(Model(Attention(), Attention())) == []
    assert found(Model(Attention(), mlp=ConvMLP())) == []


def test_a_convolutional_net_has_no_mixers() -> None:
    stage = [nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)) for _ in range(3)]
    assert found(nn.Sequential(*stage)) == []


def watched(model: nn.Module, run: Path) -> Watch:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with equipoise.watch(model, optimizer, run=run, every=1, quiet=True) as handle:
        for _ in range(12):
            ids = torch.randint(32, (2, 9))
            logits = model(ids[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return handle


def test_a_run_with_an_unread_type_of_layer_is_not_judged(tmp_path: Path) -> None:
    run = tmp_path / "a.eqp"
    handle = watched(Model(Attention(), StateSpace(), StateSpace()), run)
    verdict = handle.verdict
    assert (verdict.state, verdict.reason) == ("not judged", "gap")
    assert verdict.lead is not None and verdict.lead.params["class"] == "StateSpace"
    assert "0 of 2 StateSpace layers were read" in verdict.headline
    again = equipoise.open_run(run)
    assert again.verdict.headline == verdict.headline
    lines = worded(again.card).text["What is read"]
    assert any(line.startswith("1 of 1 attention layers") for line in lines)
    assert any("class StateSpace is unknown" in line for line in lines)
    assert [f.code for f in handle.findings].count("watch.unread.mixers") == 1


def test_a_small_unread_type_is_named_behind_healthy(tmp_path: Path) -> None:
    model = Model(*(Attention() for _ in range(8)), StateSpace(width=1))
    verdict = watched(model, tmp_path / "a.eqp").verdict
    assert verdict.state == "healthy"
    assert verdict.headline.endswith("; not seen: StateSpace")
    assert equipoise.open_run(tmp_path / "a.eqp").verdict.state == "healthy"
    coverage = equipoise.open_run(tmp_path / "a.eqp").card.sections["coverage"]
    shares = {one["class"]: one["share"] for one in coverage["layers"]}
    assert 0 < shares["StateSpace"] < 0.05 < shares["Attention"]


@pytest.mark.parametrize("share", [0.04, 0.06])
def test_the_share_decides(share: float) -> None:
    judge, _ = judged(healthy())
    judge.note([Finding.warn(0, "watch.unread.mixers", share=share)])
    assert (judge.verdict.state == "not judged") == (share > 0.05)
    judge.note([Finding.warn(0, "watch.unread.no_scores")])
    assert judge.verdict.state == "not judged"


def test_what_the_card_did_not_see_is_named_behind_healthy() -> None:
    judge, _ = judged(healthy())
    judge.unseen = {"loss.targets": "fused_loss"}
    found = worded_verdict(judge.verdict)
    assert found.state == "healthy"
    assert found.headline.endswith("; not seen: the targets (fused loss)")


def test_a_model_named_after_its_recurrence_has_other_parts_too() -> None:
    config = transformers.RecurrentGemmaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        head_dim=8,
        lru_width=32,
        block_types=["recurrent", "attention"],
    )
    found = mixers(anatomy_of(transformers.RecurrentGemmaForCausalLM(config)))
    assert [*found] == ["model.layers.0.temporal_block"]
