"""Modes, autocast, cuts and positions: what is wrong is named, what is legal is not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import equipoise
from tests.watching.facts.training import (
    LENGTH,
    OWN,
    ROWS,
    VOCABULARY,
    WIDTH,
    Model,
    causal,
    found,
    fused,
    next_token,
    text,
)

EVAL, DROPS = "check.eval_mode", "check.dropout_in_eval"
CAST, CUT = "check.autocast_inactive", "check.detached"
PLACES, AXIS, ANGLES = "check.positions", "check.softmax_axis", "check.rotary_precision"


class Dropping(Model):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__(causal())
        self.drop = nn.Dropout(rate)

    def embedded(self, ids: Tensor) -> Tensor:
        out: Tensor = self.drop(super().embedded(ids))
        return out


def test_training_in_evaluation_mode_is_named(tmp_path: Path) -> None:
    seen = found(Dropping().eval(), tmp_path)[EVAL]
    assert seen.severity == "warn" and seen.params["layers"] == 1


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_what_makes_no_difference_is_not(rate: float, tmp_path: Path) -> None:
    model = Dropping(rate)
    if rate == 0.0:
        model.eval()
    assert not found(model, tmp_path)


def test_a_model_without_dropout_may_stay_in_evaluation_mode(tmp_path: Path) -> None:
    model = Model(causal())
    model.norm_of_batch = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]
    assert not found(model.eval(), tmp_path)


def test_a_frozen_part_in_evaluation_mode_is_meant(tmp_path: Path) -> None:
    model = Dropping()
    model.drop.eval()
    assert not found(model, tmp_path)


def test_a_rate_that_a_module_keeps_as_a_number_counts(tmp_path: Path) -> None:
    model = Model(causal()).eval()
    model.blocks[0].attention.dropout = 0.1  # type: ignore[assignment]
    assert EVAL in found(model, tmp_path)


def test_a_pass_that_nothing_is_trained_by_has_no_mode(tmp_path: Path) -> None:
    model = Dropping().eval()
    run = tmp_path / "run.eqp"
    with equipoise.watch(model, run=run, every=1, quiet=True) as handle:
        for step in range(3):
            model(text(step))
            handle.step(loss=1.0)
        assert not [f for f in handle.findings if f.code == EVAL]


def evaluated(
    model: nn.Module, tmp_path: Path, *, passes: Any, steps: int = 3
) -> dict[str, Any]:
    """Train, with other passes after each update; return the checks that were found."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = tmp_path / "run.eqp"
    with equipoise.watch(model, optimizer, run=run, every=1, quiet=True) as handle:
        for step in range(steps):
            optimizer.zero_grad()
            next_token(model, text(step)).backward()
            optimizer.step()
            with torch.no_grad():
                passes(model, step)
        return {f.code: f for f in handle.findings if f.code in OWN}


def forgotten(model: nn.Module, step: int) -> None:
    model(text(1000 + step))


def with_care(model: nn.Module, step: int) -> None:
    model.eval()
    model(text(1000 + step))
    model.train()


def several_times(model: nn.Module, step: int) -> None:
    for _ in range(3):
        model(text(1000 + step))


def of_the_next_batch(model: nn.Module, step: int) -> None:
    model(text(step + 1))


def test_dropout_in_an_evaluation_is_named(tmp_path: Path) -> None:
    seen = evaluated(Dropping(), tmp_path, passes=forgotten)[DROPS]
    assert seen.severity == "warn" and seen.params["passes"] == 1


@pytest.mark.parametrize("passes", [with_care, several_times, of_the_next_batch])
def test_other_passes_without_gradients_are_meant(passes: Any, tmp_path: Path) -> None:
    assert not evaluated(Dropping(), tmp_path, passes=passes)


def test_an_evaluation_without_dropout_has_no_mode(tmp_path: Path) -> None:
    assert not evaluated(Model(causal()), tmp_path, passes=forgotten)


def test_a_trial_before_training_is_not_an_evaluation(tmp_path: Path) -> None:
    def first(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            model(text(77))
        return next_token(model, ids)

    assert not found(Dropping(), tmp_path, first, steps=1)


class Casting(Model):
    def __init__(self, *, inside: bool | None) -> None:
        super().__init__(causal())
        self.inside = inside

    def forward(self, ids: Tensor) -> Tensor:
        if self.inside is None:
            return super().forward(ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside):
            return super().forward(ids)


def in_autocast(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        z = model(ids)[:, :-1]
    return F.cross_entropy(z.float().flatten(0, 1), ids[:, 1:].flatten())


def test_autocast_that_does_nothing_is_named(tmp_path: Path) -> None:
    seen = found(Casting(inside=False), tmp_path, in_autocast)[CAST]
    assert seen.params["dtype"] == "bfloat16" and seen.params["products"] == 13


@pytest.mark.parametrize("inside", [None, True])
def test_autocast_that_casts_is_not(inside: bool | None, tmp_path: Path) -> None:
    assert not found(Casting(inside=inside), tmp_path, in_autocast)


def test_a_part_may_leave_autocast(tmp_path: Path) -> None:
    class Partly(Model):
        def embedded(self, ids: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                out: Tensor = self.norm(super().embedded(ids).float())
            return out

    assert not found(Partly(causal()), tmp_path, in_autocast)


def test_a_model_in_half_precision_has_nothing_to_cast(tmp_path: Path) -> None:
    model = Casting(inside=False).to(torch.bfloat16)
    assert CAST not in found(model, tmp_path, in_autocast)


class Cut(Model):
    """Detaches what one of its blocks is given."""

    def __init__(self, at: int, *, losses: bool = False) -> None:
        super().__init__(causal(), depth=3)
        self.at, self.losses = at, losses
        self.local: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        x, self.local = self.embedded(ids), []
        for number, block in enumerate(self.blocks):
            if number == self.at:
                self.local.append(x.square().mean())
                x = x.detach()
            x = block(x, causal(ids.shape[1]))
        out: Tensor = self.head(self.norm(x))
        return out


@pytest.mark.parametrize("at", [0, 2])
def test_a_block_whose_input_is_detached_is_named(at: int, tmp_path: Path) -> None:
    seen = found(Cut(at), tmp_path)[CUT]
    assert seen.site == f"blocks.{at}"
    assert seen.params["before"] == ("blocks.1" if at else "the embeddings")


@pytest.mark.parametrize("at", [0, 2])
def test_a_cut_before_which_another_loss_reaches_is_meant(
    at: int, tmp_path: Path
) -> None:
    """Forward-forward, and every training with losses of each layer."""

    def of_layers(model: nn.Module, ids: Tensor) -> Tensor:
        loss = next_token(model, ids)
        assert isinstance(model, Cut)
        return loss + torch.stack(model.local).sum()

    assert not found(Cut(at), tmp_path, of_layers)


def test_frozen_parts_need_no_graph(tmp_path: Path) -> None:
    model = Cut(2)
    for part in (model.tokens, model.positions, *model.blocks[:2]):
        part.requires_grad_(False)
    assert CUT not in found(model, tmp_path)


class Controlled(nn.Module):
    """A frozen model, and a copy of its blocks that is joined by maps of zeros."""

    def __init__(self, *, cut: bool = False) -> None:
        super().__init__()
        self.cut = cut
        self.base = Model(causal()).requires_grad_(requires_grad=False)
        self.copies = Model(causal()).blocks
        self.joins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.copies)
        for weight in self.joins.parameters():
            nn.init.zeros_(weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = y = self.base.embedded(ids)
        mask = causal(ids.shape[1])
        places = zip(self.base.blocks, self.copies, self.joins, strict=True)
        for block, copied, join in places:
            y = copied(y, mask)
            y = y.detach() if self.cut else y
            x = block(x, mask) + join(y)
        out: Tensor = self.base.head(self.base.norm(x))
        return out


@pytest.mark.parametrize("steps", [1, 2])
def test_a_map_of_zeros_cuts_no_graph(steps: int, tmp_path: Path) -> None:
    assert CUT not in found(Controlled(), tmp_path, steps=steps)
    assert CUT in found(Controlled(cut=True), tmp_path, steps=steps)


def test_a_cut_is_named_where_gradients_are_zeros_and_not_none(tmp_path: Path) -> None:
    def zeroed(model: nn.Module, ids: Tensor) -> Tensor:
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        return next_token(model, ids)

    assert found(Cut(2), tmp_path, zeroed)[CUT].site == "blocks.2"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_cuts_nothing(reentrant: bool, tmp_path: Path) -> None:
    class Checkpointed(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedded(ids)
            for block in self.blocks:
                x = checkpoint(block, x, self.mask, use_reentrant=reentrant)
            out: Tensor = self.head(self.norm(x))
            return out

    assert not found(Checkpointed(causal()), tmp_path)


class Placed(Model):
    def __init__(self, places: Tensor) -> None:
        super().__init__(causal())
        self.places = places

    def embedded(self, ids: Tensor) -> Tensor:
        out: Tensor = self.tokens(ids) + self.positions(self.places)
        return out


FLAT = torch.zeros(LENGTH, dtype=torch.long)


@pytest.mark.parametrize("places", [FLAT, FLAT[None], FLAT.expand(ROWS, -1) + 3])
def test_one_position_for_all_tokens_is_named(places: Tensor, tmp_path: Path) -> None:
    seen = found(Placed(places), tmp_path)[PLACES]
    assert seen.site == "positions" and seen.params["place"] == places.max()


STARTS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("places", [STARTS, STARTS[None], 40 + torch.arange(LENGTH)])
def test_positions_may_start_again_or_late(places: Tensor, tmp_path: Path) -> None:
    assert not found(Placed(places), tmp_path)


def test_a_decoding_step_has_one_position_for_each_sequence(tmp_path: Path) -> None:
    class Stepping(Model):
        def embedded(self, ids: Tensor) -> Tensor:
            place = self.positions(torch.full((ROWS,), 3))
            out: Tensor = self.tokens(ids) + place[:, None]
            return out

    assert not found(Stepping(causal()), tmp_path)


def test_a_part_that_runs_without_gradients_is_named(tmp_path: Path) -> None:
    class Without(Model):
        def embedded(self, ids: Tensor) -> Tensor:
            with torch.no_grad():
                return super().embedded(ids)

    assert found(Without(causal()), tmp_path)[CUT].site == "blocks.0"


def test_a_model_without_positions_is_not_asked(tmp_path: Path) -> None:
    class Without(Model):
        def __init__(self) -> None:
            super().__init__(causal())
            del self.positions

        def embedded(self, ids: Tensor) -> Tensor:
            out: Tensor = self.tokens(ids)
            return out

    assert not found(Without(), tmp_path)


def test_a_table_may_make_positions_of_the_mask_it_is_given(tmp_path: Path) -> None:
    class Counted(nn.Embedding):
        def forward(self, mask: Tensor) -> Tensor:
            return super().forward(mask.cumsum(1) - 1)

    class OfAMask(Model):
        def __init__(self) -> None:
            super().__init__(causal())
            self.positions = Counted(64, WIDTH)

        def embedded(self, ids: Tensor) -> Tensor:
            places = self.positions(torch.ones_like(ids))
            out: Tensor = self.tokens(ids) + places
            return out

    assert not found(OfAMask(), tmp_path)


def test_segments_are_no_positions(tmp_path: Path) -> None:
    class Segmented(Model):
        def __init__(self) -> None:
            super().__init__(causal())
            self.segments = nn.Embedding(64, WIDTH)

        def embedded(self, ids: Tensor) -> Tensor:
            out: Tensor = super().embedded(ids) + self.segments(torch.zeros_like(ids))
            return out

    assert not found(Segmented(), tmp_path)


def over(axis: int, *, again: bool = False, p: float = 0.0) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        weights = scores.softmax(axis)
        if again:
            weights = weights / weights.sum(-1, keepdim=True)
        return F.dropout(weights, p) @ v

    return attend


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_a_softmax_over_the_queries_is_named(p: float, tmp_path: Path) -> None:
    seen = found(Model(causal(), attend=over(-2, p=p)), tmp_path, strict=False)[AXIS]
    assert seen.severity == "error" and seen.params["sites"] == 2


@pytest.mark.parametrize(
    "attend",
    [over(-1), over(-1, p=0.2), over(-2, again=True)],
    ids=["keys", "keys, dropout", "queries, then keys"],
)
def test_weights_that_sum_to_one_over_the_keys_are_not(
    attend: Any, tmp_path: Path
) -> None:
    """Slot attention among them, which shares its weights out again."""
    assert AXIS not in found(Model(causal(), attend=attend), tmp_path, strict=False)


def sinkhorn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    log = q @ k.mT / q.shape[-1] ** 0.5
    for _ in range(3):
        log = log.log_softmax(-1).log_softmax(-2)
    return log.exp() @ v


def sinkhorn_by_sums(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    log = q @ k.mT / q.shape[-1] ** 0.5
    log = log - log.logsumexp(-1, keepdim=True)
    return log.softmax(-2) @ v


def sharpened(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    log = (q @ k.mT / q.shape[-1] ** 0.5).log_softmax(-1)
    return (2 * log).softmax(-2) @ v


@pytest.mark.parametrize("attend", [sinkhorn, sinkhorn_by_sums, sharpened])
def test_weights_that_are_normalised_over_both_axes_are_meant(
    attend: Any, tmp_path: Path
) -> None:
    assert AXIS not in found(Model(attend=attend), tmp_path, strict=False)


def test_slots_are_fewer_than_what_they_look_at(tmp_path: Path) -> None:
    def slots(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        weights = (q[:, :, :3] @ k.mT).softmax(-2)
        return F.pad(weights @ v, (0, 0, 0, q.shape[2] - 3))

    assert AXIS not in found(Model(attend=slots), tmp_path, strict=False)


def turned(x: Tensor, dtype: torch.dtype) -> Tensor:
    place = torch.arange(x.shape[-2], dtype=dtype)
    rates = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=dtype)
    angle = torch.outer(place, rates)
    cos, sin = (
        f(angle).to(x.dtype).repeat(1, 2)[:, :8] for f in (torch.cos, torch.sin)
    )
    return x * cos + x.roll(4, -1) * sin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_angles_in_half_precision_are_named(dtype: torch.dtype, tmp_path: Path) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return fused(turned(q, dtype), turned(k, dtype), v, mask)

    seen = found(Model(causal(), attend=attend), tmp_path)
    assert (ANGLES in seen) == (dtype != torch.float32)
    if ANGLES in seen:
        assert seen[ANGLES].params["dtype"] == str(dtype).removeprefix("torch.")


def test_sines_of_other_things_may_be_rounded(tmp_path: Path) -> None:
    class Timed(Model):
        def embedded(self, ids: Tensor) -> Tensor:
            time = torch.linspace(0, 1, WIDTH, dtype=torch.bfloat16)
            out: Tensor = super().embedded(ids) + time.sin().float()
            return out

    assert not found(Timed(causal()), tmp_path)


def test_the_card_knows_weights_by_group(tmp_path: Path) -> None:
    model = Model(causal())
    model.tokens.requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    run = tmp_path / "run.eqp"
    with equipoise.watch(model, optimizer, run=run, every=1, quiet=True) as handle:
        for step in range(2):
            next_token(model, text(step)).backward()
            optimizer.step()
        section = handle.card.sections["model"]
    groups = section["groups"]
    assert section["parameters"] == sum(p.numel() for p in model.parameters())
    assert section["parameters"] - section["trainable"] == VOCABULARY * WIDTH
    assert groups["attention"]["all"] == 2 * 4 * (WIDTH * WIDTH + WIDTH)
    embedding = {"all": (VOCABULARY + 64) * WIDTH, "trainable": 64 * WIDTH}
    assert groups["embedding"] == embedding and section["training"] is True
