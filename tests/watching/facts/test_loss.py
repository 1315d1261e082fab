"""Mistakes about the loss are named, and legal loops that look like them are not."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from equipoise.judging.checks import CHECKS
from tests.watching.facts.loops import (
    IGNORED,
    LM,
    ShiftsInside,
    V,
    found,
    next_loss,
    plain,
    text,
)

OF_THE_LOSS = {c for c, check in CHECKS.items() if check.reads == ("loss",)}
OF_THE_LOSS |= {"check.same_batch"}


def said(loop: Callable[..., None], model: nn.Module, folder: Path, **more: Any) -> Any:
    codes = found(loop, model, folder, **more)
    return {code: step for code, step in codes.items() if code in OF_THE_LOSS}


# Mistakes: what is trained, and what is said of it.


def shifted_twice(model: nn.Module, ids: Tensor) -> Tensor:
    return next_loss(model(ids), F.pad(ids, (0, 1), value=IGNORED)[:, 1:])


def not_shifted(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def not_shifted_by_class(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).transpose(1, 2), ids)


def picked_unshifted(model: nn.Module, ids: Tensor) -> Tensor:
    return -model(ids).log_softmax(-1).gather(-1, ids[..., None]).mean()


def all_ignored(model: nn.Module, ids: Tensor) -> Tensor:
    z, labels = model(ids), torch.full_like(ids, IGNORED)
    return next_loss(z, labels, reduction="sum")


def of_softmax(model: nn.Module, ids: Tensor) -> Tensor:
    return next_loss(model(ids).softmax(-1), ids)


def of_exp_of_log_softmax(model: nn.Module, ids: Tensor) -> Tensor:
    return next_loss(model(ids).log_softmax(-1).exp(), ids)


def nll_of_softmax(model: nn.Module, ids: Tensor) -> Tensor:
    p = model(ids).softmax(-1)
    return F.nll_loss(p[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def nll_of_logits(model: nn.Module, ids: Tensor) -> Tensor:
    return F.nll_loss(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def sigmoid_twice(model: nn.Module, ids: Tensor) -> Tensor:
    p, y = model(ids)[:, :-1].sigmoid(), F.one_hot(ids[:, 1:], V).float()
    return F.binary_cross_entropy_with_logits(p, y)


def rolled_rows(model: nn.Module, ids: Tensor) -> Tensor:
    return next_loss(model(ids), ids.roll(1, 0))


MISTAKES = {
    shifted_twice: "labels_shift",
    not_shifted: "labels_shift",
    not_shifted_by_class: "labels_shift",
    picked_unshifted: "labels_shift",
    all_ignored: "targets_ignored",
    of_softmax: "loss_of_probabilities",
    of_exp_of_log_softmax: "loss_of_probabilities",
    nll_of_softmax: "loss_of_probabilities",
    nll_of_logits: "loss_of_probabilities",
    sigmoid_twice: "loss_of_probabilities",
    rolled_rows: "rows_mixed",
}


@pytest.mark.parametrize("step", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes_are_named_by_the_second_step(step: Any, tmp_path: Path) -> None:
    codes = said(plain(step), LM(), tmp_path)
    assert codes.keys() == {f"check.{MISTAKES[step]}"} and max(codes.values()) <= 1


# Legal losses of one step.


def right(model: nn.Module, ids: Tensor) -> Tensor:
    return next_loss(model(ids), ids)


def smoothed(model: nn.Module, ids: Tensor) -> Tensor:
    return next_loss(model(ids), ids, label_smoothing=0.1)


def with_z_loss(model: nn.Module, ids: Tensor) -> Tensor:
    z = model(ids)
    return next_loss(z, ids) + 1e-4 * (z.logsumexp(-1) ** 2).mean()


def token_weights(model: nn.Module, ids: Tensor) -> Tensor:
    each = next_loss(model(ids), ids, reduction="none")
    weight = torch.linspace(0.5, 2.0, len(each))
    return (each * weight).sum() / weight.sum()


def multi_token(model: nn.Module, ids: Tensor) -> Tensor:
    z = model(ids)
    ahead = F.cross_entropy(z[:, :-2].flatten(0, 1), ids[:, 2:].flatten())
    return next_loss(z, ids) + 0.3 * ahead


def chunked(model: nn.Module, ids: Tensor) -> Tensor:
    z, y = model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    parts = zip(z.chunk(4), y.chunk(4), strict=True)
    losses = [F.cross_entropy(a, b, reduction="sum") for a, b in parts]
    return torch.stack(losses).sum() / len(y)


def chunked_and_checkpointed(model: nn.Module, ids: Tensor) -> Tensor:
    def part(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="sum")

    z, y = model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    parts = zip(z.chunk(4), y.chunk(4), strict=True)
    losses = [checkpoint(part, a, b, use_reentrant=False) for a, b in parts]
    return torch.stack(losses).sum() / len(y)


def prompts_ignored(model: nn.Module, ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[:, :16] = IGNORED
    return next_loss(model(ids), labels)


def masked_inputs(model: nn.Module, ids: Tensor) -> Tensor:
    hide = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    kept = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.1
    given = ids.masked_fill(hide & ~kept, 0)
    labels = ids.masked_fill(~hide, IGNORED)
    return F.cross_entropy(model(given).flatten(0, 1), labels.flatten())


def diffused(model: nn.Module, ids: Tensor) -> Tensor:
    hide = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    z = model(ids.masked_fill(hide, 0))
    each = F.cross_entropy(z.transpose(1, 2), ids, reduction="none")
    return (each * hide / 0.5).mean()


def contrastive(model: nn.Module, ids: Tensor) -> Tensor:
    h = F.normalize(model(ids).mean(1), dim=-1)
    return F.cross_entropy(h @ h.T / 0.1, torch.arange(len(ids)))


def distilled(model: nn.Module, ids: Tensor) -> Tensor:
    z = model(ids)
    teacher = torch.randn(z.shape, generator=torch.Generator().manual_seed(4))
    p = teacher.softmax(-1).flatten(0, 1)
    return F.cross_entropy(z.flatten(0, 1), p) + F.kl_div(
        z.log_softmax(-1).flatten(0, 1), p, reduction="batchmean"
    )


def preference(model: nn.Module, ids: Tensor) -> Tensor:
    logp = model(ids)[:, :-1].log_softmax(-1)
    each = logp.gather(-1, ids[:, 1:, None])[..., 0].sum(-1)
    chosen, rejected = each.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def policy(model: nn.Module, ids: Tensor) -> Tensor:
    logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    advantage = torch.linspace(-1, 1, len(ids))[:, None]
    ratio = (logp - logp.detach()).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def negative(model: nn.Module, ids: Tensor) -> Tensor:
    return -0.1 * next_loss(model(ids), ids)


def offset_and_factor(model: nn.Module, ids: Tensor) -> Tensor:
    return 3.0 * next_loss(model(ids), ids) + 5.0


def one_token(model: nn.Module, ids: Tensor) -> Tensor:
    ids = torch.full_like(ids, 3)
    return not_shifted(model, ids)


def mixture_of_softmaxes(model: nn.Module, ids: Tensor) -> Tensor:
    z = model(ids)
    p = 0.5 * z.softmax(-1) + 0.5 * (2 * z).softmax(-1)
    return F.nll_loss(p.log()[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def log_softmax_twice(model: nn.Module, ids: Tensor) -> Tensor:
    return next_loss(model(ids).log_softmax(-1), ids)


def tempered(model: nn.Module, ids: Tensor) -> Tensor:
    return next_loss(30 * torch.tanh(model(ids) / 30), ids)


def sum_of_tokens(model: nn.Module, ids: Tensor) -> Tensor:
    return next_loss(model(ids), ids, reduction="sum")


LEGAL = [
    *(right, smoothed, with_z_loss, token_weights, multi_token, chunked, policy),
    *(chunked_and_checkpointed, prompts_ignored, masked_inputs, diffused, negative),
    *(contrastive, distilled, preference, offset_and_factor, one_token, tempered),
    *(mixture_of_softmaxes, log_softmax_twice, sum_of_tokens),
]


@pytest.mark.parametrize("step", LEGAL, ids=lambda f: f.__name__)
def test_legal_losses_are_passed_over(step: Any, tmp_path: Path) -> None:
    assert said(plain(step), LM(), tmp_path) == {}


def test_what_is_checkpointed_is_not_run_once_more(tmp_path: Path) -> None:
    """A saved tensor that is unpacked by running code again is left alone."""
    runs = 0

    def loss(z: Tensor, y: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return F.cross_entropy(z, y)

    def step(model: nn.Module, ids: Tensor) -> Tensor:
        z, y = model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        return checkpoint(loss, z, y, use_reentrant=False)

    assert said(plain(step), LM(), tmp_path, steps=3) == {}
    assert runs == 3 * 2


def test_a_masked_model_is_no_mistake(tmp_path: Path) -> None:
    assert said(plain(masked_inputs), LM(causal=False), tmp_path) == {}


def test_an_encoder_may_reconstruct_what_it_reads(tmp_path: Path) -> None:
    """Without a causal mask the target is among the inputs by design, or by mistake."""
    assert said(plain(not_shifted), LM(causal=False), tmp_path) == {}


def test_a_model_that_shifts_inside_is_given_unshifted_labels(tmp_path: Path) -> None:
    assert said(plain(not_shifted), ShiftsInside(), tmp_path) == {}


def test_a_padded_vocabulary_is_cut(tmp_path: Path) -> None:
    def step(model: nn.Module, ids: Tensor) -> Tensor:
        return next_loss(model(ids)[..., :V], ids)

    assert said(plain(step), LM(classes=V + 8), tmp_path) == {}


def test_classes_of_sentences_are_no_tokens(tmp_path: Path) -> None:
    def step(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).mean(1), ids[:, 0])

    assert said(plain(step), LM(causal=False), tmp_path) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_mistake_is_named_in_every_format(dtype: Any, tmp_path: Path) -> None:
    assert said(plain(shifted_twice), LM().to(dtype), tmp_path) == {
        "check.labels_shift": 0
    }


# Micro-batches.


def accumulating(factor: float, parts: int = 4, **options: Any) -> Callable[..., None]:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(parts):
                ids = text(100 * step + part)
                (factor * next_loss(model(ids), ids, **options)).backward()
            optimizer.step()

    return loop


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_sums_of_means_are_named(parts: int, tmp_path: Path) -> None:
    codes = said(accumulating(1.0, parts), LM(), tmp_path)
    assert codes == {"check.microbatch_weights": 0}


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_a_second_division_is_named(parts: int, tmp_path: Path) -> None:
    codes = said(accumulating(parts**-2, parts), LM(), tmp_path)
    assert codes == {"check.microbatch_weights": 0}


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_a_mean_of_micro_batches_is_right(parts: int, tmp_path: Path) -> None:
    assert said(accumulating(1 / parts, parts), LM(), tmp_path) == {}


@pytest.mark.parametrize("factor", [0.1, 2.0, 128.0])
def test_a_factor_is_a_choice(factor: float, tmp_path: Path) -> None:
    assert said(accumulating(factor / 4), LM(), tmp_path) == {}


def test_tokens_of_all_micro_batches_divide_a_sum(tmp_path: Path) -> None:
    tokens = 4 * 8 * 23
    loop = accumulating(1 / tokens, reduction="sum")
    assert said(loop, LM(), tmp_path) == {}
    assert said(accumulating(1.0, reduction="sum"), LM(), tmp_path / "b") == {}


def test_a_scaler_is_not_part_of_the_weights(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(4):
                ids = text(100 * step + part)
                scaler.scale(next_loss(model(ids), ids) / 4).backward()
            scaler.step(optimizer)
            scaler.update()

    assert said(loop, LM(), tmp_path) == {}


def test_two_losses_of_one_batch_are_not_micro_batches(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            z, ids = model(text(step)), text(step)
            next_loss(z, ids).backward(retain_graph=True)
            next_loss(2 * z, ids).backward()
            optimizer.step()

    assert said(loop, LM(), tmp_path) == {}


def test_sharpness_aware_steps_clear_the_first_gradient(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            for number in (2 * step, 2 * step + 1):  # even of two batches
                optimizer.zero_grad()
                next_loss(model(text(number)), text(number)).backward()
            optimizer.step()

    assert said(loop, LM(), tmp_path) == {}


# Auxiliary losses.


class Balanced(LM):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.router, self.kept_as = nn.Linear(16, 4), name

    def forward(self, ids: Tensor) -> Tensor:
        p = self.router(self.embedded(ids)).softmax(-1).mean((0, 1))
        setattr(self, self.kept_as, 4 * (p * p).sum())
        return super().forward(ids)


def balanced(name: str, add: Callable[[Tensor], Any]) -> Callable[..., None]:
    def step(model: nn.Module, ids: Tensor) -> Tensor:
        loss = next_loss(model(ids), ids)
        return loss + 0.1 * add(getattr(model, name))

    return plain(step)


def test_a_balance_that_is_added_as_a_number_is_named(tmp_path: Path) -> None:
    """At the second step, or as soon as it moves by more than the loss is rounded."""
    for name, add in (("balance", Tensor.item), ("aux", Tensor.detach)):
        codes = said(balanced(name, add), Balanced(name), tmp_path / name)
        assert codes.keys() == {"check.auxiliary_detached"} and max(codes.values()) < 4


def test_an_auxiliary_loss_that_is_left_out_is_named(tmp_path: Path) -> None:
    codes = said(plain(right), Balanced("aux_loss"), tmp_path)
    assert codes == {"check.auxiliary_detached": 0}


def test_what_is_kept_as_a_diagnostic_is_none(tmp_path: Path) -> None:
    assert said(plain(right), Balanced("entropy"), tmp_path) == {}
    offset = plain(offset_and_factor)
    assert said(offset, Balanced("entropy"), tmp_path / "b") == {}


def test_an_auxiliary_loss_in_the_graph_is_right(tmp_path: Path) -> None:
    loop = balanced("aux_loss", lambda x: x)
    assert said(loop, Balanced("aux_loss"), tmp_path) == {}
    loop = balanced("aux_loss", lambda x: 0.0 * x)
    assert said(loop, Balanced("aux_loss"), tmp_path / "b") == {}


# Ends of documents.


class Config:
    eos_token_id = 1


def documents(*, ignored: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    def step(model: nn.Module, ids: Tensor) -> Tensor:
        ids = ids.clamp(min=2)
        ids[:, 15:] = 1  # the end token is the padding too
        labels = ids.clone()
        labels[:, 15 if ignored else 16 :] = IGNORED
        return next_loss(model(ids), labels)

    return step


def test_ends_that_are_never_a_target_are_named(tmp_path: Path) -> None:
    model = LM()
    model.config = Config()  # type: ignore[assignment]
    assert said(plain(documents(ignored=True)), model, tmp_path) == {
        "check.eos_ignored": 0
    }
    model = copy.deepcopy(LM())
    model.config = Config()  # type: ignore[assignment]
    assert said(plain(documents(ignored=False)), model, tmp_path / "b") == {}


def test_without_a_known_end_token_nothing_is_said(tmp_path: Path) -> None:
    assert said(plain(documents(ignored=True)), LM(), tmp_path) == {}


# Batches.


def repeating(make: Callable[[int], Tensor]) -> Callable[..., None]:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            ids = make(step)
            optimizer.zero_grad()
            next_loss(model(ids), ids).backward()
            optimizer.step()

    return loop


def test_a_batch_that_is_made_again_each_step_is_named(tmp_path: Path) -> None:
    codes = said(repeating(lambda step: text(0)), LM(), tmp_path, steps=12)
    assert codes == {"check.same_batch": 7}


def test_a_batch_that_is_kept_is_a_choice(tmp_path: Path) -> None:
    ids = text(0)
    assert said(repeating(lambda step: ids), LM(), tmp_path, steps=12) == {}
    views = repeating(lambda step: ids[:])
    assert said(views, LM(), tmp_path / "b", steps=12) == {}


def test_an_epoch_of_few_batches_is_no_repeat(tmp_path: Path) -> None:
    loop = repeating(lambda step: text(step % 2))
    assert said(loop, LM(), tmp_path, steps=12) == {}


def test_a_loader_of_one_batch_is_a_full_batch(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(text(0))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    loop = repeating(lambda step: next(iter(loader))[0])
    assert said(loop, LM(), tmp_path, steps=12) == {}
