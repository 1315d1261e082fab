"""Influence, tried: what moves and should not is named, and nothing is left behind."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from equipoise.errors import InputError
from equipoise.watching.facts.influence import TRIED
from tests.watching.facts.training import (
    IGNORED,
    LENGTH,
    WIDTH,
    Model,
    causal,
    found,
    next_token,
    text,
)

STEPS = TRIED[0] + 1
FUTURE, EXAMPLES = "check.influence_future", "check.influence_examples"
PADDING, DOCUMENTS = "check.influence_padding", "check.influence_documents"
EAGER = "check.eager_differs"
PLACES, REPEATED = "check.no_positions", "check.not_repeatable"


def tried(model: nn.Module, tmp_path: Path, *args: Any, **options: Any) -> set[str]:
    given = {"steps": STEPS, "checks": "active", **options}
    return set(found(model, tmp_path, *args, **given))


class Convolved(Model):
    """A convolution over time, padded at the left or at both sides."""

    def __init__(self, *, left: bool) -> None:
        super().__init__(causal())
        self.left, self.conv = left, nn.Conv1d(WIDTH, WIDTH, 3)

    def embedded(self, ids: Tensor) -> Tensor:
        x = super().embedded(ids)
        sides = (2, 0) if self.left else (1, 1)
        out: Tensor = x + self.conv(F.pad(x.mT, sides)).mT
        return out


def test_a_leak_that_is_no_attention_is_named(tmp_path: Path) -> None:
    assert tried(Convolved(left=False), tmp_path) == {FUTURE}
    assert not found(Convolved(left=False), tmp_path, steps=STEPS)  # passively


def test_a_causal_convolution_is_not(tmp_path: Path) -> None:
    assert not tried(Convolved(left=True), tmp_path)


class Inside(Convolved):
    """Returns its loss alone, of rows that are laid out in one of several ways."""

    def __init__(self, rows: str, *, left: bool) -> None:
        super().__init__(left=left)
        self.rows, self.mask = rows, lambda ids: causal(ids.shape[1])

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        z_BTV = super().forward(ids)
        if self.rows == "next token within":
            z_BTV, targets = z_BTV[:, :-1], ids[:, 1:]
        assert targets is not None
        if self.rows == "classes second":
            return F.cross_entropy(z_BTV.mT, targets)
        if self.rows == "tokens first":
            z_BTV, targets = z_BTV.transpose(0, 1), targets.T
        z_NV, target_N = z_BTV.flatten(0, 1), targets.flatten()
        if self.rows == "chunks":
            parts = zip(z_NV.chunk(3), target_N.chunk(3), strict=True)
            sums = [F.cross_entropy(z, t, reduction="sum") for z, t in parts]
            return torch.stack(sums).sum() / len(z_NV)
        return F.cross_entropy(z_NV, target_N)


def own_loss(model: nn.Module, ids: Tensor) -> Tensor:
    out: Tensor = model(ids[:, :-1], ids[:, 1:])
    return out


@pytest.mark.parametrize(
    "rows", ["rows", "next token within", "classes second", "chunks"]
)
def test_a_model_that_returns_its_loss_alone_is_tried(
    rows: str, tmp_path: Path
) -> None:
    """As nanochat does: its logits are those that its loss function is given."""
    assert tried(Inside(rows, left=False), tmp_path / "wrong", own_loss) == {FUTURE}
    assert not tried(Inside(rows, left=True), tmp_path / "right", own_loss)


@pytest.mark.parametrize("left", [True, False])
def test_rows_of_a_loss_with_tokens_first_are_not_tried(
    left: bool, tmp_path: Path
) -> None:
    """Sequences in another order do not come back as rows in that order."""
    assert not tried(Inside("tokens first", left=left), tmp_path, own_loss)


def test_an_encoder_may_see_ahead(tmp_path: Path) -> None:
    def masked(model: nn.Module, ids: Tensor) -> Tensor:
        hidden = torch.arange(LENGTH) % 3 == 1
        z = model(ids.masked_fill(hidden, 1))
        return F.cross_entropy(z[:, hidden].flatten(0, 1), ids[:, hidden].flatten())

    assert not tried(Model(), tmp_path, masked)


def test_a_prefix_may_see_itself(tmp_path: Path) -> None:
    shows = causal()
    shows[:, :6] = True

    def after_the_prefix(model: nn.Module, ids: Tensor) -> Tensor:
        labels = ids.masked_fill(torch.arange(LENGTH) < 6, IGNORED)[:, 1:]
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels.flatten())

    assert not tried(Model(shows), tmp_path, after_the_prefix)


def test_a_row_of_padding_may_see_anything(tmp_path: Path) -> None:
    """Scores that are all alike are shared out over all keys, the future included."""
    real = torch.arange(LENGTH).expand(6, -1) >= 7

    class Left(Model):
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            assert attention_mask is not None
            shows = causal() & attention_mask[:, None, None, :]
            lowest = torch.finfo().min
            self.mask = torch.zeros(shows.shape).masked_fill(~shows, lowest)
            return super().forward(ids)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        labels = ids.masked_fill(~real, IGNORED)[:, 1:]
        z = model(ids, attention_mask=real)[:, :-1]
        return F.cross_entropy(z.flatten(0, 1), labels.flatten())

    assert not tried(Left(), tmp_path, loss)


class Answered(Model):
    """Reads a question before it answers: a vector of the whole of it."""

    def forward(self, ids: Tensor, answer: Tensor | None = None) -> Tensor:
        assert answer is not None
        question = self.tokens(ids).mean(1, keepdim=True)
        x = self.embedded(answer) + question
        for block in self.blocks:
            x = block(x, causal())
        out: Tensor = self.head(x)
        return out


def test_a_question_moves_its_answer(tmp_path: Path) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        z = model(ids, ids.clone())[:, :-1]
        return F.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten())

    assert not tried(Answered(causal()), tmp_path, loss)


class Mixed(Model):
    def embedded(self, ids: Tensor) -> Tensor:
        x = super().embedded(ids)
        out: Tensor = x + x.roll(1, 0)
        return out


def test_sequences_that_reach_each_other_are_named(tmp_path: Path) -> None:
    assert tried(Mixed(causal()), tmp_path) == {EXAMPLES}


class Normed(Model):
    def __init__(self) -> None:
        super().__init__(causal())
        self.batch = nn.BatchNorm1d(WIDTH)

    def embedded(self, ids: Tensor) -> Tensor:
        out: Tensor = self.batch(super().embedded(ids).mT).mT
        return out


def test_statistics_of_a_batch_are_not(tmp_path: Path) -> None:
    assert not tried(Normed(), tmp_path)


class Padded(Model):
    """Takes the mask of its loop, and uses it or not."""

    def __init__(self, *, uses: bool) -> None:
        super().__init__(causal())
        self.uses = uses

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is not None
        shows = causal() & attention_mask[:, None, None, :]
        shows = shows | torch.eye(LENGTH, dtype=torch.bool)
        self.mask = shows if self.uses else causal()
        return super().forward(ids)


@pytest.mark.parametrize("uses", [False, True])
def test_padding_that_moves_something_is_named(uses: bool, tmp_path: Path) -> None:
    real = torch.arange(LENGTH).expand(6, -1) >= torch.tensor([[0, 1, 2, 3, 4, 5]]).mT

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        labels = ids.masked_fill(~real, IGNORED)[:, 1:]
        z = model(ids, attention_mask=real)[:, :-1]
        return F.cross_entropy(z.flatten(0, 1), labels.flatten())

    assert (PADDING in tried(Padded(uses=uses), tmp_path, loss)) == (not uses)


class Packed(Model):
    def __init__(self, *, uses: bool) -> None:
        super().__init__(causal())
        self.uses = uses

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        assert position_ids is not None
        document = (position_ids == 0).cumsum(1)
        shows = causal() & (document[:, None, :, None] == document[:, None, None])
        self.mask = shows if self.uses else causal()
        return super().forward(ids)


@pytest.mark.parametrize("uses", [False, True])
def test_documents_that_reach_each_other_are_named(uses: bool, tmp_path: Path) -> None:
    places = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]).expand(6, -1)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        z = model(ids, position_ids=places)[:, :-1]
        return F.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten())

    assert (DOCUMENTS in tried(Packed(uses=uses), tmp_path, loss)) == (not uses)


class Evaluated(Packed):
    """Packs while it trains only, as transformers does under checkpointing."""

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.uses = self.training
        return super().forward(ids, position_ids)


def packed(model: nn.Module, ids: Tensor) -> Tensor:
    places = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]).expand(len(ids), -1)
    out = model(ids, position_ids=places)
    z = getattr(out, "logits", out)[:, :-1]
    return F.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten())


def test_a_mask_that_only_evaluation_makes_is_not_named(tmp_path: Path) -> None:
    assert not tried(Evaluated(uses=True), tmp_path, packed)


@pytest.mark.parametrize("cached", [False, True])
def test_a_cache_undoes_packs_by_positions(cached: bool, tmp_path: Path) -> None:
    """Transformers looks for packs in position ids only where it makes no cache."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=cached,
    )
    model = transformers.LlamaForCausalLM(config)
    assert (DOCUMENTS in tried(model, tmp_path, packed)) == cached


class Capacity(nn.Module):
    """Experts that take no more tokens than their share, from the last one on."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 1
        self.gate = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            # Full: the last tokens of the batch are taken first.
            at = (chosen == number).nonzero()[:, 0].flip(0)[: len(flat) // 3]
            out = out.index_add(0, at, weight[at, None] * expert(flat[at]))
        return out.view_as(x)


def test_a_capacity_mixes_tokens_by_design(tmp_path: Path) -> None:
    model = Model(causal())
    for block in model.blocks:
        block.mlp = Capacity()
    assert not tried(model, tmp_path)


class Within(Model):
    """Enters autocast within its forward, where no one outside sees it."""

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.embedded(ids)
            for block in self.blocks:
                x = block(x, causal())
        out: Tensor = self.head(self.norm(x.float()))
        return out


def far_from_zero() -> Model:
    """Return a model that makes much of rounding: scores and sums are large."""
    model = Model(causal())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0 if p.ndim > 1 else 0.0)
    return model


@pytest.mark.parametrize("make", [lambda: Within(causal()), far_from_zero])
def test_rounding_is_no_difference_of_kernels(make: Any, tmp_path: Path) -> None:
    assert not tried(make(), tmp_path)


def test_a_kernel_that_differs_is_named(tmp_path: Path) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scale = 1.05 if torch.backends.cuda.flash_sdp_enabled() else 1.0
        return scale * F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    assert tried(Model(causal(), attend=wrong), tmp_path) == {EAGER}


class Added(Model):
    """Adds positions along the batch: all tokens of a sequence get the same ones."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.right = right
        self.register_buffer("pe", torch.randn(64, WIDTH))

    def embedded(self, ids: Tensor) -> Tensor:
        pe = self.get_buffer("pe")
        places = pe[:LENGTH] if self.right else pe[: len(ids), None]
        out: Tensor = self.tokens(ids) + places
        return out


@pytest.mark.parametrize("right", [False, True])
def test_positions_that_reach_nothing_are_named(right: bool, tmp_path: Path) -> None:
    def classes(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), (ids * 7 % 11).flatten())

    assert (PLACES in tried(Added(right=right), tmp_path, classes)) == (not right)


class Random(Model):
    """Random in evaluation: by dropout that is never off, or by design."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__(causal())
        self.drops = drops

    def embedded(self, ids: Tensor) -> Tensor:
        x = super().embedded(ids)
        return F.dropout(x, 0.2) if self.drops else x + 0.1 * torch.randn_like(x)


@pytest.mark.parametrize("drops", [False, True])
def test_dropout_that_is_never_off_is_named(drops: bool, tmp_path: Path) -> None:
    both = {REPEATED, "check.dropout_in_eval"}
    assert tried(Random(drops=drops), tmp_path) == (both if drops else set())


class Counting(Normed):
    """Keeps state in Python, in a buffer and in a list, and draws from all three."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()
        self.drop = nn.Dropout(0.1)

    def embedded(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.last = ids
        random.random(), np.random.rand()
        out: Tensor = self.drop(super().embedded(ids))
        return out


def trained(tmp_path: Path, checks: str | None) -> tuple[Any, ...]:
    """Return all that a training leaves behind."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: Any = {"run": tmp_path / f"{checks}.eqp", "every": 1, "quiet": True}
    handle = checks and equipoise.watch(model, optimizer, checks=checks, **options)
    losses = []
    for step in range(TRIED[1] + 3):
        optimizer.zero_grad()
        loss = next_token(model, text(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if handle:
        assert handle.card.sections["influence"]["tried"] is (checks == "active")
        handle.close()
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    state = (model.calls, model.seen, model.training, sorted(vars(model)))
    draws = (torch.rand(1).item(), random.random(), np.random.rand())
    return losses, [t.detach().clone() for t in tensors], state, draws


@pytest.mark.parametrize("checks", ["passive", "active"])
def test_the_model_cannot_tell(checks: str, tmp_path: Path) -> None:
    alone, watched = trained(tmp_path, None), trained(tmp_path, checks)
    assert alone[0] == watched[0] and alone[2:] == watched[2:]
    assert all(map(torch.equal, alone[1], watched[1]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.register_forward_hook(lambda *_: None), "hooks"),
        (lambda m: setattr(m, "head", nn.Identity()), ""),
    ],
)
def test_what_is_not_sure_is_not_tried(change: Any, why: str, tmp_path: Path) -> None:
    model = Convolved(left=False)
    change(model)

    def loss(one: nn.Module, ids: Tensor) -> Tensor:
        out: Tensor = one(ids).square().mean()
        return out

    assert not tried(model, tmp_path, loss if not why else next_token)


def test_a_mistaken_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="passive or active"):
        equipoise.watch(Model(), checks="sometimes", run=tmp_path / "r.eqp")  # type: ignore[arg-type]
