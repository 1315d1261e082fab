"""Controls: optimisers of many kinds, their schedules, and loops around them."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

from equipoise_lab.mistakes.case import control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach, batches, text
from equipoise_lab.mistakes.sealed_second import loops, models
from equipoise_lab.mistakes.sealed_second.loops import by_class, program, run
from equipoise_lab.mistakes.sealed_second.models import Nano, nano_loss

LANGUAGE = parts.language_loss


class Stateful(torch.optim.Optimizer):
    """An optimiser of one's own: a rule for one weight, with a rate."""

    def __init__(self, weights, lr: float, rule) -> None:
        super().__init__(weights, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, self.state[p], group["lr"])


def moments(p: Tensor, state: dict) -> tuple[Tensor, Tensor]:
    """Return Adam's two moments, corrected for their start."""
    m = state.setdefault("exp_avg", torch.zeros_like(p))
    v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
    state["step"] = state.get("step", 0) + 1
    m.lerp_(p.grad, 0.1)
    v.lerp_(p.grad.square(), 0.01)
    return m / (1 - 0.9 ** state["step"]), v / (1 - 0.99 ** state["step"])


def lamb(p: Tensor, state: dict, lr: float) -> None:
    m, v = moments(p, state)
    update = m / (v.sqrt() + 1e-6)
    trust = p.norm() / update.norm() if p.norm() > 0 else 1.0
    p.sub_(lr * trust * update)


def cautious(p: Tensor, state: dict, lr: float) -> None:
    m, v = moments(p, state)
    agrees = (m * p.grad > 0).float()
    p.sub_(lr * m / (v.sqrt() + 1e-8) * agrees / agrees.mean().clamp(min=1e-3))


def two_speeds(p: Tensor, state: dict, lr: float) -> None:
    m, v = moments(p, state)
    slow = state.setdefault("slow", torch.zeros_like(p)).lerp_(p.grad, 0.01)
    p.sub_(lr * (m + 2 * slow) / (v.sqrt() + 1e-8))


def low_rank(p: Tensor, state: dict, lr: float) -> None:
    """GaLore: Adam in the space of the gradient's first singular vectors."""
    if p.ndim < 2:
        p.sub_(lr * p.grad.sign())
        return
    count = state.setdefault("seen", 0)
    if count % 10 == 0:
        state["basis"] = torch.linalg.svd(p.grad, full_matrices=False)[0][:, :8]
    state["seen"] = count + 1
    small = state["basis"].T @ p.grad
    m = state.setdefault("m", torch.zeros_like(small)).lerp_(small, 0.1)
    v = state.setdefault("v", torch.zeros_like(small)).lerp_(small.square(), 0.01)
    p.sub_(lr * state["basis"] @ (m / (v.sqrt() + 1e-8)))


def langevin(p: Tensor, state: dict, lr: float) -> None:
    p.sub_(lr * p.grad - 1e-3 * lr**0.5 * torch.randn_like(p))


def unit_length(p: Tensor, state: dict, lr: float) -> None:
    p.sub_(lr * p.grad / (p.grad.norm() + 1e-8))


def own(rule, lr: float):
    return lambda model: Stateful(model.parameters(), lr, rule)


for name, source, make, loss, optimizers in (
    ("adafactor", "torch: Adafactor", models.olmo, LANGUAGE,
     by_class(torch.optim.Adafactor, lr=2e-2)),
    ("rmsprop_of_neox", "torch: RMSprop, partial rotary", models.neox, LANGUAGE,
     by_class(torch.optim.RMSprop, lr=1e-3)),
    ("adagrad", "torch: Adagrad", Nano, nano_loss,
     by_class(torch.optim.Adagrad, lr=2e-2)),
    ("radam", "torch: RAdam", models.gemma3, LANGUAGE,
     by_class(torch.optim.RAdam, lr=5e-3)),
    ("adamax", "torch: Adamax", Nano, nano_loss,
     by_class(torch.optim.Adamax, lr=5e-3)),
    ("averaged_descent", "torch: ASGD", Nano, nano_loss,
     by_class(torch.optim.ASGD, lr=0.5)),
    ("amsgrad_in_one_kernel", "torch: fused AdamW with AMSGrad", Nano, nano_loss,
     by_class(torch.optim.AdamW, lr=3e-3, amsgrad=True, fused=True)),
    ("nesterov", "torch: SGD with Nesterov's momentum", models.qwen3, LANGUAGE,
     by_class(torch.optim.SGD, lr=0.3, momentum=0.9, nesterov=True)),
    ("lion_on_gemma", "Lion (Chen et al.)", models.gemma3, LANGUAGE,
     by_class(loops.Lion, lr=1e-3)),
    ("trust_ratios", "LAMB (You et al.)", Nano, nano_loss, own(lamb, 2e-2)),
    ("cautious_adam", "Cautious optimizers (Liang et al.)", Nano, nano_loss,
     own(cautious, 3e-3)),
    ("two_averages_of_the_gradient", "AdEMAMix (Pagliardini et al.)", Nano, nano_loss,
     own(two_speeds, 1e-3)),
    ("gradients_of_low_rank", "GaLore (Zhao et al.)", Nano, nano_loss,
     own(low_rank, 3e-3)),
    ("langevin_noise", "SGLD (Welling and Teh)", Nano, nano_loss, own(langevin, 0.3)),
    ("gradients_of_length_one", "normalised gradient descent", Nano, nano_loss,
     own(unit_length, 0.1)),
    ("muon_and_adamw_of_qwen", "Muon beside AdamW", models.qwen3, LANGUAGE,
     loops.muon_and_adamw),
):  # fmt: skip
    program(name, source, make, loss, optimizers=optimizers, clip=1.0, average=True)


def wsd(optimizer: torch.optim.Optimizer):
    def factor(step: int) -> float:
        return min((step + 1) / 5, 1.0, max(0.0, (STEPS - step) / 10))

    return schedules.LambdaLR(optimizer, factor)


def transformers_schedule(name: str):
    def make(optimizer: torch.optim.Optimizer):
        from transformers import get_scheduler

        return get_scheduler(name, optimizer, 4, 2 * STEPS)

    return make


for name, source, schedule in (
    ("warm_up_stable_decay", "WSD: down to 0 at the very end", wsd),
    ("a_cyclic_rate", "torch: CyclicLR, momentum left alone", lambda o:
     schedules.CyclicLR(o, 1e-3, 4e-3, 10, cycle_momentum=False)),
    ("a_polynomial_rate", "torch: PolynomialLR", lambda o:
     schedules.PolynomialLR(o, 2 * STEPS, 2.0)),
    ("a_rate_of_the_inverse_root", "transformers: inverse_sqrt",
     transformers_schedule("inverse_sqrt")),
    ("cosine_with_hard_restarts", "transformers: cosine_with_restarts",
     transformers_schedule("cosine_with_restarts")),
    ("a_rate_multiplied_each_step", "torch: MultiplicativeLR", lambda o:
     schedules.MultiplicativeLR(o, lambda step: 0.97)),
    ("milestones", "torch: MultiStepLR", lambda o:
     schedules.MultiStepLR(o, [10, 20, 30], 0.5)),
    ("constant_then_warm", "torch: ConstantLR beside ExponentialLR", lambda o:
     schedules.ChainedScheduler([schedules.ConstantLR(o, 0.3, 5),
                                 schedules.ExponentialLR(o, 0.98)])),
):  # fmt: skip
    program(name, source, Nano, schedule=schedule, evaluate=nano_loss, lr=4e-3)


def layerwise(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model.bert.embeddings.parameters()), "lr": 1e-3}]
    for depth, layer in enumerate(model.bert.encoder.layer):
        groups.append({"params": list(layer.parameters()), "lr": 2e-3 * 2**depth})
    groups.append({"params": list(model.cls.predictions.transform.parameters())})
    groups[-1]["params"].append(model.cls.predictions.bias)
    return torch.optim.AdamW(groups, lr=4e-3)


def corrupted_loss(model: nn.Module, step: int) -> Tensor:
    ids, labels = parts.corrupted(step)
    loss: Tensor = model(input_ids=ids, labels=labels).loss
    return loss


program(
    "rates_that_fall_with_depth", "BERT: a rate for each layer",
    parts.bert, corrupted_loss, optimizers=layerwise, data=range(STEPS),
)  # fmt: skip


def decayed_apart(model: nn.Module) -> torch.optim.Optimizer:
    wide = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.0)


program(
    "gains_that_are_not_decayed", "minGPT: decay for matrices only",
    models.gemma3, LANGUAGE, optimizers=decayed_apart, schedule=loops.warm_cosine,
)  # fmt: skip
program(
    "a_negative_loss_that_is_maximised", "torch: maximize=True",
    Nano, lambda m, ids: -nano_loss(m, ids),
    optimizers=by_class(torch.optim.AdamW, lr=3e-3, maximize=True),
)  # fmt: skip


@control(source="Schedule-Free (Defazio et al.): weights differ in train and eval")
def free_of_a_schedule(watch: Attach) -> None:
    model, lr, beta = Nano(), 0.01, 0.9
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.0, 0.99))
    mean = [p.detach().clone() for p in model.parameters()]
    base = [p.detach().clone() for p in model.parameters()]
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS), 1):
        with torch.no_grad():
            for p, z, x in zip(model.parameters(), base, mean, strict=True):
                p.copy_(z.lerp(x, beta))
        optimizer.zero_grad()
        nano_loss(model, ids).backward()
        with torch.no_grad():
            for p, z in zip(model.parameters(), base, strict=True):
                p.copy_(z)
        optimizer.step()
        with torch.no_grad():
            for p, z, x in zip(model.parameters(), base, mean, strict=True):
                z.copy_(p)
                x.lerp_(z, 1 / step)


@control(source="mixed precision by hand: fp32 masters of bf16 weights")
def masters_of_bf16_weights(watch: Attach) -> None:
    model = Nano()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        nano_loss(model, ids).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)


@control(source="torch.func: weights of a dictionary, and a call without state")
def weights_outside_of_their_module(watch: Attach) -> None:
    model = Nano()
    weights = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        given = (ids[:, :-1], ids[:, 1:])
        loss = torch.func.functional_call(model, weights, given)
        for p, grad in zip(
            weights.values(),
            torch.autograd.grad(loss, list(weights.values())),
            strict=True,
        ):
            p.grad = grad
        optimizer.step()


@control(source="MeZO (Malladi et al.): two forward passes and no backward pass")
def descent_without_a_backward_pass(watch: Attach) -> None:
    model = parts.learnt(Nano(), nano_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch(model, optimizer)
    for step, ids in enumerate(parts.elsewhere()):

        def shift(by: float, step: int = step) -> None:
            rng = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.add_(by * torch.randn(p.shape, generator=rng))

        with torch.no_grad():
            shift(1e-3)
            up = nano_loss(model, ids)
            shift(-2e-3)
            slope = (up - nano_loss(model, ids)) / 2e-3
            shift(1e-3)
            rng = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = slope * torch.randn(p.shape, generator=rng)
        optimizer.step()


@control(source="Sophia (Liu et al.): curvature from sampled labels, every fifth step")
def curvature_of_sampled_labels(watch: Attach) -> None:
    model = Nano()

    def rule(p: Tensor, state: dict, lr: float) -> None:
        m = state.setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        p.sub_(lr * (m / state["h"].clamp(min=1e-4)).clamp(-1, 1))

    optimizer = Stateful(model.parameters(), 1e-3, rule)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        if step % 5 == 0:
            logits = model(ids[:, :-1]).flatten(0, 1)
            drawn = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
            F.cross_entropy(logits, drawn).backward()
            for p in model.parameters():
                h = optimizer.state[p].setdefault("h", torch.zeros_like(p))
                h.lerp_(len(logits) * p.grad.square(), 0.1)
            optimizer.zero_grad()
        nano_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


@control(source="torch.optim.swa_utils: an average with its own batch statistics")
def stochastic_weight_averaging(watch: Attach) -> None:
    from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

    model = models.Patches()
    model.stem = nn.Sequential(model.stem, nn.BatchNorm2d(32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    averaged, flat = AveragedModel(model), SWALR(optimizer, 1e-3, anneal_epochs=2)
    watch(model, optimizer)
    for step in range(120):
        x, y = parts.pictures(step, 32)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step >= 80 and step % 5 == 0:
            averaged.update_parameters(model)
            flat.step()
    update_bn([parts.pictures(900)[0]], averaged)


@control(source="own: batches whose loss is not finite or jumps are left out")
def batches_with_a_jump_are_left_out(watch: Attach) -> None:
    model, mean = Nano(), 4.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS + 8)):
        if step % 12 == 7:
            ids = torch.randint(32, ids.shape)
        loss = nano_loss(model, ids)
        value = float(loss.detach())
        if value > 1.3 * mean:
            continue
        mean = 0.8 * mean + 0.2 * value
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@control(source="PaLM: after a spike an earlier checkpoint is loaded, batches skipped")
def a_rollback_to_an_earlier_checkpoint(watch: Attach) -> None:
    model = Nano()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS + 10)):
        if step == 15:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 25:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        nano_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


@control(source="progressive stacking: layers are added, and join the optimiser")
def layers_added_while_training(watch: Attach) -> None:
    model = Nano(depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS + 10)):
        if step in (15, 30):
            block = copy.deepcopy(model.blocks[-1])
            model.blocks.append(block)
            optimizer.add_param_group({"params": list(block.parameters())})
        nano_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


@control(source="own: rows grow longer and batches larger as training goes on")
def a_curriculum_of_lengths_and_batches(watch: Attach) -> None:
    data = (text(4 + step // 5, 8 + step // 2, seed=step) for step in range(STEPS))
    run(Nano(), watch, data=data, schedule=loops.warm_cosine, clip=1.0)


@control(source="own: a full batch, which is all the data there is, and LBFGS")
def a_full_batch_of_a_small_table(watch: Attach) -> None:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=rng)
    y = (x[:, :1] * x[:, 1:2] + x[:, 2:3]).tanh()
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    watch(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
