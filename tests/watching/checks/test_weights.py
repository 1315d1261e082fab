"""Checks of weights: each names its mistake, and nothing that only looks like it."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from tests.watching.checks.loops import Loop, Watched, cases, checked, loss, trained
from tests.watching.models import TinyModel, batches, objective


def parts(model: TinyModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    own = list(model.head.parameters())
    rest = [p for p in model.parameters() if not any(p is q for q in own)]
    return own, rest


# Mistakes, each with the code that must name it and the step at which it can.


def loss_made_anew(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)
    for batch in batches(6):
        optimizer.zero_grad()
        torch.tensor(loss(model, batch).item(), requires_grad=True).backward()
        optimizer.step()


def head_forgotten(watch: Watched) -> None:
    model = TinyModel()
    _, rest = parts(model)
    optimizer = AdamW(rest, lr=1e-3)
    trained(watch, model, optimizer, after=lambda step: model.zero_grad())


def optimiser_of_a_copy(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(copy.deepcopy(model).parameters(), lr=0.1)
    trained(watch, model, optimizer, after=lambda step: model.zero_grad())


def rounded_away(watch: Watched) -> None:
    model = TinyModel()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    model = model.bfloat16()
    trained(watch, model, AdamW(model.parameters(), lr=1e-5, weight_decay=0.0))


def never_cleared(watch: Watched) -> None:
    trained(watch, clear=False)


def cleared_in_part(watch: Watched) -> None:
    model = TinyModel()
    trained(watch, model, clear=False, after=lambda step: model.head.zero_grad())


def state_cleared(watch: Watched) -> None:
    model = TinyModel()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    trained(watch, model, optimizer, after=lambda step: optimizer.state.clear())


class Tied(TinyModel):
    """Promises in its configuration that input and output share their weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.config = type("Config", (), {"tie_word_embeddings": True})()
        if tied:
            self.head.weight = self.embedding.weight


def tie_lost(watch: Watched) -> None:
    trained(watch, Tied(tied=False))


def logarithm_of_zero(watch: Watched) -> None:
    model = TinyModel()
    model.decay = nn.Parameter(torch.tensor([0.0, 1.0]).log())
    trained(watch, model)


def not_a_number_in_a_buffer(watch: Watched) -> None:
    model = TinyModel()
    model.register_buffer("scale", torch.full((4,), torch.nan))
    trained(watch, model)


class Adapted(TinyModel):
    """Adds the product of two maps, of which one or both begin at zero."""

    def __init__(self, *, zeros: int) -> None:
        super().__init__()
        self.down = nn.Linear(16, 4, bias=False)
        self.up = nn.Linear(4, 16, bias=False)
        for module in (self.up, self.down)[:zeros]:
            nn.init.zeros_(module.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x + self.up(self.down(x)))
        return out


def both_zero(watch: Watched) -> None:
    trained(watch, Adapted(zeros=2))


def frozen_at_random(watch: Watched) -> None:
    model = TinyModel()
    for p in model.blocks.parameters():
        p.requires_grad_(p.ndim == 1)
    trained(watch, model)


def a_prefix_too_many(watch: Watched) -> None:
    state = {f"model.{k}": x.clone() for k, x in before_trained().state_dict().items()}
    model = TinyModel()
    model.load_state_dict(state, strict=False)
    trained(watch, model)


def a_prefix_too_few(watch: Watched) -> None:
    state = {k: x.clone() for k, x in before_trained().state_dict().items()}
    model = nn.Sequential(TinyModel())
    model.load_state_dict(state, strict=False)
    trained(watch, model)


class Stacks(nn.Module):
    """An encoder of blocks, and a head; what lies between may cut the graph."""

    def __init__(self, cut: str = "") -> None:
        super().__init__()
        self.encoder, self.cut = TinyModel(), cut
        self.head = nn.Linear(11, 11)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.cut != "no_grad"):
            x = self.encoder(ids)
        out: Tensor = self.head(x.detach() if self.cut == "detach" else x)
        return out


def encoder_under_no_grad(watch: Watched) -> None:
    trained(watch, Stacks("no_grad"))


def encoder_cut_off(watch: Watched) -> None:
    trained(watch, Stacks("detach"))


def norms_in_no_group(watch: Watched) -> None:
    model = TinyModel()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    trained(watch, model, AdamW(matrices, lr=1e-3))


def unfrozen_too_late(watch: Watched) -> None:
    model = before_trained()
    model.blocks.requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    unfreeze = lambda step: model.blocks.requires_grad_(step >= 2)  # noqa: E731
    trained(watch, model, optimizer, after=unfreeze)


def adapted_too_late(watch: Watched) -> None:
    """The optimiser holds the base, which is frozen by now, and not the adapters."""
    model = before_trained()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model.requires_grad_(False)
    model.head = nn.Sequential(model.head, nn.Linear(11, 11))
    trained(watch, model, optimizer, after=lambda step: model.zero_grad())


MISTAKES = {
    encoder_under_no_grad: ("check.no_gradient", 2),
    encoder_cut_off: ("check.no_gradient", 2),
    norms_in_no_group: ("check.not_optimised", 1),
    unfrozen_too_late: ("check.not_optimised", 3),
    adapted_too_late: ("check.not_optimised", 1),
    a_prefix_too_many: ("check.not_loaded", 0),
    a_prefix_too_few: ("check.not_loaded", 0),
    loss_made_anew: ("check.no_gradient", 2),
    head_forgotten: ("check.not_optimised", 1),
    optimiser_of_a_copy: ("check.foreign_parameters", 1),
    rounded_away: ("check.no_movement", 2),
    never_cleared: ("check.stale_gradient", 1),
    cleared_in_part: ("check.stale_gradient", 1),
    state_cleared: ("check.moments_reset", 2),
    tie_lost: ("check.untied", 0),
    logarithm_of_zero: ("check.nonfinite_parameters", 0),
    not_a_number_in_a_buffer: ("check.nonfinite_parameters", 0),
    both_zero: ("check.zero_parameters", 2),
    frozen_at_random: ("check.frozen_random", 0),
}


@cases(*MISTAKES)
def test_a_mistake_is_named_as_soon_as_it_can_be(loop: Loop, tmp_path: Path) -> None:
    code, step = MISTAKES[loop]
    assert checked(loop, tmp_path).get(code) == step


# Correct loops that look like one of them.


class WithPooler(TinyModel):
    """Its pooler runs, and no loss reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        self.pooler(x[:, 0])
        out: Tensor = self.head(x)
        return out


def unused_pooler(watch: Watched) -> None:
    trained(watch, WithPooler())


class WithExperts(TinyModel):
    """One expert of four gets all tokens; the others get none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.experts[0](x))
        return out


def idle_experts(watch: Watched) -> None:
    trained(watch, WithExperts())


class Dropping(TinyModel):
    """Leaves out a layer in every other step."""

    passes = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.passes += 1
        x = self.blocks[0](self.embedding(tokens))
        x = self.blocks[1](x) if self.passes % 2 else x
        out: Tensor = self.head(x)
        return out


def dropped_layers(watch: Watched) -> None:
    trained(watch, Dropping())


def adversarial_networks(watch: Watched) -> None:
    """What the made one's loss leaves in the judge is cleared before its own pass."""
    made, judge = TinyModel(), nn.Linear(11, 1)
    one, two = AdamW(made.parameters(), lr=1e-3), AdamW(judge.parameters(), lr=1e-3)
    watch(made, one)
    watch(judge, two)
    for batch in batches(6):
        two.zero_grad()
        fake = made(batch)
        judge(fake.detach().softmax(-1)).mean().backward()
        two.step()
        one.zero_grad()
        (-judge(fake.softmax(-1)).mean()).backward()
        one.step()


def one_model_of_both_sides(watch: Watched) -> None:
    """Cleared in place, before its own pass only: the other side's is left over."""
    both = nn.ModuleDict({"made": TinyModel(), "judge": nn.Linear(11, 1)})
    one = AdamW(both["made"].parameters(), lr=1e-3)
    two = AdamW(both["judge"].parameters(), lr=1e-3)
    watch(both, [one, two])
    for batch in batches(6):
        two.zero_grad(set_to_none=False)
        fake = both["made"](batch)
        both["judge"](fake.detach().softmax(-1)).mean().backward()
        two.step()
        one.zero_grad(set_to_none=False)
        (-both["judge"](fake.softmax(-1)).mean()).backward()
        one.step()


def teacher_beside(watch: Watched) -> None:
    """A moving average of the student: no gradient, no optimiser."""
    student = TinyModel()
    teacher = copy.deepcopy(student)
    both = nn.ModuleDict({"student": student, "teacher": teacher})
    optimizer = AdamW(student.parameters(), lr=1e-3)
    watch(both, optimizer)
    for batch in batches(6):
        optimizer.zero_grad()
        with torch.no_grad():
            aim = both["teacher"](batch)
        F.mse_loss(both["student"](batch), aim + 1).backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
                p.lerp_(q, 0.1)


def one_map_at_zero(watch: Watched) -> None:
    trained(watch, Adapted(zeros=1))


class Gated(TinyModel):
    """ReZero's gates, and adaLN-Zero's map, which begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.zeros(2))
        self.modulation = nn.Linear(16, 16)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for gate, block in zip(self.gates, self.blocks, strict=True):
            x = x + gate * block(x)
        out: Tensor = self.head(x * (1 + self.modulation(x)))
        return out


def gates_at_zero(watch: Watched) -> None:
    trained(watch, Gated())


def zero_output_maps(watch: Watched) -> None:
    model = TinyModel()
    for block in model.blocks:
        nn.init.zeros_(block.down.weight)
        nn.init.zeros_(block.attention.o_proj.weight)
    trained(watch, model)


def before_trained() -> TinyModel:
    model = TinyModel()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for batch in batches(2):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    model.zero_grad()
    return model


def norms_tuned(watch: Watched) -> None:
    model = before_trained()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name)
    trained(watch, model, AdamW(p for p in model.parameters() if p.requires_grad))


def biases_tuned(watch: Watched) -> None:
    model = before_trained()
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    trained(watch, model, AdamW(p for p in model.parameters() if p.requires_grad))


def frozen_backbone(watch: Watched) -> None:
    model = before_trained()
    model.requires_grad_(False)
    model.head = nn.Linear(16, 11)
    trained(watch, model, AdamW(model.head.parameters(), lr=1e-3))


def backbone_left_as_it_is(watch: Watched) -> None:
    """A probe on a backbone that is not frozen, and that no optimiser holds."""
    model = before_trained()
    model.head = nn.Linear(16, 11)
    optimizer = AdamW(model.head.parameters(), lr=1e-3)
    trained(watch, model, optimizer, after=lambda step: model.zero_grad())


def learnt_temperature(watch: Watched) -> None:
    """In the criterion, and in the optimiser with the model."""
    model, scale = TinyModel(), nn.Parameter(torch.zeros(()))
    optimizer = AdamW([*model.parameters(), scale], lr=1e-3)
    watch(model, optimizer)
    for batch in batches(6):
        optimizer.zero_grad()
        logits = model(batch[:, :-1]) * scale.exp()
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()


def temperature_left_out(watch: Watched) -> None:
    model = TinyModel()
    model.scale = nn.Parameter(torch.zeros(1))
    optimizer = AdamW([p for p in model.parameters() if p is not model.scale], lr=1e-3)
    watch(model, optimizer)
    for batch in batches(6):
        model.zero_grad()
        logits = model(batch[:, :-1]) * model.scale.exp()
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()


def a_part_is_watched(watch: Watched) -> None:
    model = nn.ModuleDict({"backbone": TinyModel(), "extra": nn.Linear(11, 11)})
    optimizer = AdamW(model.parameters(), lr=1e-3)
    watch(model["backbone"], optimizer)
    for batch in batches(6):
        optimizer.zero_grad()
        logits = model["extra"](model["backbone"](batch[:, :-1]))
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()


def an_optimiser_that_steps_rarely(watch: Watched) -> None:
    model = TinyModel()
    own, rest = parts(model)
    optimizer, rare = AdamW(rest, lr=1e-3), AdamW(own, lr=1e-3)

    def sometimes(step: int) -> None:
        if step % 4 == 3:
            rare.step()
            rare.zero_grad()

    trained(watch, model, optimizer, after=sometimes)


def copies_in_another_precision(watch: Watched) -> None:
    """The optimiser holds float32 copies, which are written back."""
    model = TinyModel()
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = AdamW(copies, lr=1e-3)
    watch(model, optimizer)
    for batch in batches(6):
        model.zero_grad()
        loss(model, batch).backward()
        for master, p in zip(copies, model.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(copies, model.parameters(), strict=True):
                p.copy_(master)


def accumulation(watch: Watched) -> None:
    model = TinyModel()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step, batch in enumerate(batches(16)):
        (loss(model, batch) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def cleared_in_place(watch: Watched) -> None:
    model = TinyModel()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for batch in batches(6):
        optimizer.zero_grad(set_to_none=False)
        loss(model, batch).backward()
        optimizer.step()


def sharpness_aware(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    watch(model, optimizer)
    for batch in batches(6):
        loss(model, batch).backward()
        with torch.no_grad():
            moved = [
                (p, 0.01 * p.grad.sign())
                for p in model.parameters()
                if p.grad is not None
            ]
            for p, by in moved:
                p.add_(by)
        model.zero_grad()
        loss(model, batch).backward()
        with torch.no_grad():
            for p, by in moved:
                p.sub_(by)
        optimizer.step()
        optimizer.zero_grad()


def gradient_penalty(watch: Watched) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        x = torch.randn(5, 4, requires_grad=True)
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.pow(2).sum()).backward()
        optimizer.step()


def closures(watch: Watched) -> None:
    model = TinyModel().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    watch(model, optimizer)
    for batch in batches(4):

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            value = objective(model, batch)
            value.backward()
            return value

        optimizer.step(closure)


def steps_left_out(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    watch(model, optimizer)
    for step, batch in enumerate(batches(6)):
        optimizer.zero_grad()
        scaler.scale(loss(model, batch)).backward()
        if step in (2, 3):
            nn.init.constant_(model.head.weight.grad, torch.inf)
        scaler.step(optimizer)
        scaler.update()


def cached_gradients(watch: Watched) -> None:
    """Representations first, without a graph; their gradients are put in afterwards."""
    model = TinyModel()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for batch in batches(6):
        optimizer.zero_grad()
        with torch.no_grad():
            cached = model(batch).requires_grad_()
        F.cross_entropy(cached[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
        model(batch).backward(cached.grad)
        optimizer.step()


def planned_reset(watch: Watched) -> None:
    model = TinyModel()
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def reset(step: int) -> None:
        if step == 3:
            optimizer.state.clear()

    trained(watch, model, optimizer, after=reset)


def stages(watch: Watched) -> None:
    model = TinyModel()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step, batch in enumerate(batches(9)):
        if step == 4:
            optimizer = AdamW(model.parameters(), lr=1e-4)
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def no_momentum(watch: Watched) -> None:
    model = TinyModel()
    trained(watch, model, SGD(model.parameters(), lr=0.05))


def warm_up_in_bf16(watch: Watched) -> None:
    model = TinyModel().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step * 1e-6)
    trained(watch, model, optimizer, after=lambda step: schedule.step())


def stochastic_rounding(watch: Watched) -> None:
    """Most weights stay at each update, and some move by a whole unit."""
    model = TinyModel().bfloat16()
    wide = [p.detach().float() for p in model.parameters()]

    class Stochastic(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1e-4})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    exact = p.float() - 1e-4 * p.grad.float().sign()
                    noise = torch.rand_like(exact) - 0.5
                    p.copy_(exact + noise * exact.abs() * 2.0**-8)

    assert wide
    trained(watch, model, Stochastic(model.parameters()))


def group_at_rate_zero(watch: Watched) -> None:
    model = TinyModel()
    own, rest = parts(model)
    optimizer = AdamW([{"params": own}, {"params": rest, "lr": 0.0}], lr=1e-3)
    trained(watch, model, optimizer)


def tie_kept(watch: Watched) -> None:
    trained(watch, Tied(tied=True))


def copy_of_an_adapter(watch: Watched) -> None:
    """As PEFT keeps a head of its own: ``modules_to_save``."""
    wrapper = type("ModulesToSaveWrapper", (nn.Linear,), {})
    model = Tied(tied=False)
    model.head = wrapper(16, 11)
    trained(watch, model)


def masks_of_infinity(watch: Watched) -> None:
    model = TinyModel()
    model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    model.frozen_mask = nn.Parameter(torch.tensor([-torch.inf]), requires_grad=False)
    trained(watch, model)


def optimiser_within_backward(watch: Watched) -> None:
    model = TinyModel()
    each = {p: SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    watch(model, list(each.values()))
    for batch in batches(6):
        loss(model, batch).backward()


def loaded_without_its_prefix(watch: Watched) -> None:
    """The state with the prefix is still there, and so is the one that fits."""
    state = {f"model.{k}": x.clone() for k, x in before_trained().state_dict().items()}
    fits = {k.removeprefix("model."): x for k, x in state.items()}
    model = TinyModel()
    model.load_state_dict(fits)
    trained(watch, model)
    assert state


def an_average_under_a_prefix(watch: Watched) -> None:
    model = TinyModel()
    average = {f"module.{k}": x.clone() for k, x in model.state_dict().items()}
    trained(watch, model)
    assert average


def from_scratch_beside_another(watch: Watched) -> None:
    teacher = before_trained()
    trained(watch, TinyModel())
    assert teacher


def averaged_part(watch: Watched) -> None:
    """A teacher inside the model: held by the optimiser, moved by an average."""
    model = Stacks()
    model.teacher = copy.deepcopy(model.encoder)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = model

        def forward(self, ids: Tensor) -> Tensor:
            with torch.no_grad():
                seen = model.teacher(ids)
            return model(ids) + 0.1 * seen

    def average(step: int) -> None:
        pairs = zip(model.teacher.parameters(), model.encoder.parameters(), strict=True)
        for mean, p in pairs:
            mean.data.lerp_(p.data, 0.1)

    trained(watch, Both(), after=average)


def unfrozen_with_a_group(watch: Watched) -> None:
    model = before_trained()
    model.blocks.requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def unfreeze(step: int) -> None:
        if step == 2:
            model.blocks.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks.parameters())})

    trained(watch, model, optimizer, after=unfreeze)


def test_a_part_that_an_average_moves_is_not_cut_off(tmp_path: Path) -> None:
    assert "check.no_gradient" not in checked(averaged_part, tmp_path)


@cases(
    unfrozen_with_a_group,
    loaded_without_its_prefix,
    an_average_under_a_prefix,
    from_scratch_beside_another,
    unused_pooler,
    idle_experts,
    dropped_layers,
    adversarial_networks,
    one_model_of_both_sides,
    teacher_beside,
    one_map_at_zero,
    gates_at_zero,
    zero_output_maps,
    norms_tuned,
    biases_tuned,
    frozen_backbone,
    backbone_left_as_it_is,
    learnt_temperature,
    temperature_left_out,
    a_part_is_watched,
    an_optimiser_that_steps_rarely,
    copies_in_another_precision,
    accumulation,
    cleared_in_place,
    sharpness_aware,
    gradient_penalty,
    closures,
    steps_left_out,
    cached_gradients,
    planned_reset,
    stages,
    no_momentum,
    warm_up_in_bf16,
    stochastic_rounding,
    group_at_rate_zero,
    tie_kept,
    copy_of_an_adapter,
    masks_of_infinity,
    optimiser_within_backward,
)
def test_nothing_is_said_of_a_correct_loop(loop: Loop, tmp_path: Path) -> None:
    assert checked(loop, tmp_path) == {}


def test_a_finding_is_withdrawn_when_the_loop_is_mended(tmp_path: Path) -> None:
    def mended(watch: Watched) -> None:
        model = TinyModel()
        optimizer = AdamW(model.parameters(), lr=1e-3)
        watch(model, optimizer)
        for step, batch in enumerate(batches(8)):
            if step > 4:
                optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

    assert checked(mended, tmp_path) == {}
