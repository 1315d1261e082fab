"""Controls: losses whose targets are not the next token, or not only that.

Axes, in this file:  B batch · T token · C channel · V vocabulary · N class.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from equipoise_lab.mistakes.case import control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import (
    EOS,
    IGNORED,
    STEPS,
    Attach,
    Decoder,
    text,
)
from equipoise_lab.mistakes.sealed_second import loops, models
from equipoise_lab.mistakes.sealed_second.forward import masked_loss, pictures
from equipoise_lab.mistakes.sealed_second.loops import program, run
from equipoise_lab.mistakes.sealed_second.models import Encoder, Nano, nano_loss

COUNT = range(STEPS)


def trained() -> Nano:
    return parts.learnt(Nano(), nano_loss)


def frozen(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False).eval()


def pairs(step: int) -> tuple[Tensor, Tensor]:
    """Return a prompt's good and bad continuation."""
    good = text(8, 16, seed=step)
    bad = torch.cat((good[:, :6], torch.randint(32, (8, 10))), 1)
    return good, bad


def answer(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean log-probability of each row's answer, (B,)."""
    each = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
    return -each[:, 5:].mean(1)


def orpo(model: nn.Module, step: int) -> Tensor:
    good, bad = (answer(model, ids) for ids in pairs(step))
    odds = [one - torch.log1p(-one.exp().clamp(max=0.999)) for one in (good, bad)]
    return -good.mean() - 0.1 * F.logsigmoid(odds[0] - odds[1]).mean()


def simpo(model: nn.Module, step: int) -> Tensor:
    good, bad = (answer(model, ids) for ids in pairs(step))
    return -F.logsigmoid(0.5 * (good - bad) - 0.5).mean()


def beside(model: nn.Module, other: nn.Module) -> nn.Module:
    """Keep another model beside this one, not as a part of it."""
    model.__dict__["other"] = frozen(other)
    return model


def with_reference(rule):
    """Return a loss that compares with the model as it began."""

    def loss(model: nn.Module, step: int) -> Tensor:
        both = []
        for ids in pairs(step):
            with torch.no_grad():
                before = answer(model.other, ids)
            both.append(answer(model, ids) - before)
        return rule(*both)

    return loss


def referred() -> nn.Module:
    model = trained()
    return beside(model, model)


def ipo(good: Tensor, bad: Tensor) -> Tensor:
    return (good - bad - 0.5).square().mean()


def kto(good: Tensor, bad: Tensor) -> Tensor:
    return 1 - (good.sigmoid().mean() + (-bad).sigmoid().mean()) / 2


for name, source, make, loss in (
    ("odds_ratios_without_a_reference", "ORPO (Hong et al.)", trained, orpo),
    ("preferences_by_length", "SimPO (Meng et al.)", trained, simpo),
    ("preferences_of_squares", "IPO (Azar et al.)", referred, with_reference(ipo)),
    ("good_and_bad_apart", "KTO (Ethayarajh et al.)", referred, with_reference(kto)),
):
    program(name, source, make, loss, data=COUNT, lr=5e-4, clip=1.0)


def rollout(model: nn.Module, step: int, group: int = 4) -> tuple[Tensor, Tensor]:
    """Draw answers of a few prompts, and say how many even tokens each has."""
    ids = text(4, 5, seed=step).repeat_interleave(group, 0)
    with torch.no_grad():
        for _ in range(7):
            p = model(ids)[:, -1].softmax(-1)
            ids = torch.cat((ids, torch.multinomial(p, 1)), 1)
    return ids, (ids[:, 5:] % 2 == 0).float().mean(1)


def taken(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])[:, 4:].log_softmax(-1)
    return logits.gather(-1, ids[:, 5:, None])[..., 0]


def leave_one_out(model: nn.Module, step: int) -> Tensor:
    ids, reward = rollout(model, step)
    reward = reward.view(-1, 4)
    base = (reward.sum(1, keepdim=True) - reward) / 3
    return -((reward - base).flatten() * taken(model, ids).sum(1)).mean()


def grpo(model: nn.Module, step: int) -> Tensor:
    ids, reward = rollout(model, step)
    reward = reward.view(-1, 4)
    spread = reward.std(1, keepdim=True) + 1e-4
    gain = ((reward - reward.mean(1, keepdim=True)) / spread).flatten()
    new = taken(model, ids)
    ratio = (new - new.detach()).exp()
    return -(ratio * gain[:, None]).mean()


def best_of_four(model: nn.Module, step: int) -> Tensor:
    """Rejection sampling: the best answer of each prompt is learnt as text."""
    ids, reward = rollout(model, step)
    best = reward.view(-1, 4).argmax(1) + 4 * torch.arange(4)
    return -taken(model, ids[best]).mean()


for name, source, loss in (
    ("rewards_against_the_other_draws", "RLOO (Ahmadian et al.)", leave_one_out),
    ("groups_on_policy", "GRPO (Shao et al.): a ratio that is 1", grpo),
    ("the_best_of_four_answers", "RAFT (Dong et al.)", best_of_four),
):
    program(name, source, trained, loss, data=COUNT, lr=1e-3, clip=1.0)


def embedded(model: Encoder, ids: Tensor) -> Tensor:
    """Return one vector a row, (B, C)."""
    x = F.dropout(model.embedded(ids), 0.1, model.training)
    for layer in model.layers:
        x = layer(x)
    return F.normalize(model.head(x).mean(1), dim=-1)


def views(step: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    ids = text(rows, 16, seed=step)
    noise = torch.rand(ids.shape) < 0.2
    return ids, ids.masked_fill(noise, parts.MASK)


def simcse(model: nn.Module, step: int) -> Tensor:
    ids = text(16, 16, seed=step)
    scores = 10 * embedded(model, ids) @ embedded(model, ids).T
    return F.cross_entropy(scores, torch.arange(16))


def siglip(model: nn.Module, step: int) -> Tensor:
    a, b = (embedded(model, ids) for ids in views(step))
    signs = 2 * torch.eye(len(a)) - 1
    return -F.logsigmoid(signs * (10 * a @ b.T - 5)).sum(1).mean()


def barlow(model: nn.Module, step: int) -> Tensor:
    a, b = (embedded(model, ids) for ids in views(step))
    a, b = ((x - x.mean(0)) / (x.std(0) + 1e-4) for x in (a, b))
    cross = a.T @ b / len(a)
    apart = cross.square().sum() - cross.diagonal().square().sum()
    return (1 - cross.diagonal()).square().sum() + 0.01 * apart


def vicreg(model: nn.Module, step: int) -> Tensor:
    a, b = (5 * embedded(model, ids) for ids in views(step))
    spread = sum((1 - x.std(0)).relu().mean() for x in (a, b))
    covary = sum(x.T.cov().triu(1).square().sum() / 32 for x in (a, b))
    return 10 * F.mse_loss(a, b) + 10 * spread + covary


def triplets(model: nn.Module, step: int) -> Tensor:
    a, b = (embedded(model, ids) for ids in views(step))
    return F.triplet_margin_loss(a, b, b.roll(1, 0), margin=0.5)


def matryoshka(model: nn.Module, step: int) -> Tensor:
    a, b = (embedded(model, ids) for ids in views(step))
    total = 0.0
    for width in (8, 16, 32):
        one, two = (F.normalize(x[:, :width], dim=-1) for x in (a, b))
        total = total + F.cross_entropy(10 * one @ two.T, torch.arange(len(a)))
    return total / 3


for name, source, loss in (
    ("one_row_under_two_dropouts", "SimCSE (Gao et al.)", simcse),
    ("pairs_by_a_sigmoid", "SigLIP (Zhai et al.)", siglip),
    ("redundancy_reduced", "Barlow twins (Zbontar et al.)", barlow),
    ("variance_and_covariance", "VICReg (Bardes et al.)", vicreg),
    ("triplets_with_a_margin", "triplet loss", triplets),
    ("nested_embeddings", "Matryoshka representations (Kusupati et al.)", matryoshka),
):
    program(
        name, source, Encoder, loss, data=COUNT, lr=1e-3, schedule=loops.warm_cosine
    )


class Predicting(nn.Module):
    """Predicts, from masked text, the features of a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.predictor = Encoder(), nn.Linear(32, 32)
        self.teacher = frozen(self.student)

    def forward(self, step: int) -> Tensor:
        with torch.no_grad():
            pairs = zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            )
            for kept, now in pairs:
                kept.lerp_(now, 0.05)
        ids, hidden = text(seed=step), torch.rand(8, 24) < 0.5
        with torch.no_grad():
            wanted = F.layer_norm(self.teacher(ids), (32,))
        made = self.predictor(self.student(ids.masked_fill(hidden, parts.MASK)))
        return F.smooth_l1_loss(made[hidden], wanted[hidden])


program(
    "features_of_a_following_teacher", "data2vec, I-JEPA",
    Predicting, lambda m, step: m(step), data=COUNT,
    optimizers=lambda m: torch.optim.AdamW(
        [*m.student.parameters(), *m.predictor.parameters()], lr=3e-3
    ),
)  # fmt: skip


def mixed_denoisers(model: nn.Module, step: int) -> Tensor:
    """UL2: a prefix, a span or noise, by the step's number."""
    ids = text(seed=step).clamp(min=3)
    if step % 3 == 0:
        given, wanted = ids[:, :12], ids[:, 12:]
    elif step % 3 == 1:
        given = torch.cat((ids[:, :8], ids[:, 12:]), 1)
        wanted = ids[:, 8:12]
    else:
        given, wanted = parts.corrupted(step)
        return model(input_ids=given, labels=wanted).loss
    return model(input_ids=given, labels=wanted.contiguous()).loss


program("a_mixture_of_denoisers", "UL2 (Tay et al.)", parts.t5, mixed_denoisers,
        data=COUNT, clip=1.0)  # fmt: skip


def permuted(model: nn.Module, step: int) -> Tensor:
    """σ-GPT: tokens in a random order, each told its own and the next one's place."""
    ids = text(seed=step)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(step))
    shuffled = ids[:, order]
    x = model.tokens(shuffled) + model.positions(order)
    x = x + model.positions(32 + F.pad(order[1:], (0, 1)))
    for block in model.blocks:
        x = block(x)
    return parts.next_token_loss(model.head(model.norm(x)), shuffled)


program("text_in_a_random_order", "XLNet, σ-GPTs (Pannatier et al.)", Decoder,
        permuted, data=COUNT)  # fmt: skip


def sampled_softmax(model: nn.Module, ids: Tensor) -> Tensor:
    """Word2vec's loss: one true token against eight drawn ones."""
    x, y = model.hidden(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
    drawn = torch.randint(32, (len(y), 8))
    weight = model.lm_head.weight
    good = (x * weight[y]).sum(-1)
    bad = (x[:, None] * weight[drawn]).sum(-1)
    return -F.logsigmoid(good).mean() - F.logsigmoid(-bad).sum(1).mean()


def checkpointed_chunks(model: nn.Module, ids: Tensor) -> Tensor:
    x, y = model.hidden(ids[:, :-1]), ids[:, 1:]

    def part(x: Tensor, y: Tensor) -> Tensor:
        logits = model.lm_head(x).flatten(0, 1)
        return F.cross_entropy(logits, y.flatten(), reduction="sum")

    chunks = zip(x.split(6, 1), y.split(6, 1), strict=True)
    total = sum(checkpoint(part, a, b, use_reentrant=False) for a, b in chunks)
    return total / y.numel()


def loss_of_the_hardest(model: nn.Module, ids: Tensor) -> Tensor:
    """Rho-1's kind: only the half of the tokens with the largest loss count."""
    each = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
    return each.flatten().topk(each.numel() // 2).values.mean()


def two_passes_agree(model: nn.Module, ids: Tensor) -> Tensor:
    """R-Drop: two dropouts of one batch, and their divergence."""
    wanted = ids[:, 1:].flatten()
    one, two = (
        model.lm_head(F.dropout(model.hidden(ids[:, :-1]), 0.1)).flatten(0, 1)
        for _ in range(2)
    )
    a, b = one.log_softmax(-1), two.log_softmax(-1)
    apart = F.kl_div(a, b, log_target=True) + F.kl_div(b, a, log_target=True)
    return F.cross_entropy(one, wanted) + F.cross_entropy(two, wanted) + apart


def copied_or_made(model: nn.Module, ids: Tensor) -> Tensor:
    """A pointer network's mixture: probabilities, and the loss of their logarithm."""
    x, y = ids[:, :-1], ids[:, 1:]
    seen = model.hidden(x)
    made = model.lm_head(seen).softmax(-1)
    scores = (seen @ seen.mT).masked_fill(~models.causal(x.shape[1]), -1e9)
    copied = scores.softmax(-1) @ F.one_hot(x, 32).float()
    share = seen.mean(-1, keepdim=True).sigmoid()
    p = share * made + (1 - share) * copied
    return F.nll_loss((p + 1e-9).log().flatten(0, 1), y.flatten())


def smoothed_without_the_first(model: nn.Module, ids: Tensor) -> Tensor:
    labels = ids[:, 1:].clone()
    labels[:, :4] = IGNORED
    logits = model(ids[:, :-1]).flatten(0, 1)
    made = F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)
    return made + 1e-4 * logits.logsumexp(-1).square().mean()


for name, source, loss in (
    ("a_softmax_of_drawn_negatives", "word2vec (Mikolov et al.)", sampled_softmax),
    ("a_checkpointed_loss_in_chunks", "torchtune's chunked loss", checkpointed_chunks),
    ("only_the_hardest_tokens_count", "Rho-1 (Lin et al.)", loss_of_the_hardest),
    ("two_dropouts_that_agree", "R-Drop (Liang et al.)", two_passes_agree),
    ("tokens_copied_or_made", "pointer-generator networks", copied_or_made),
    ("a_warm_up_of_tokens_ignored", "own: first tokens ignored, smoothing, z-loss",
     smoothed_without_the_first),
):  # fmt: skip
    program(name, source, Nano, loss, clip=1.0)


def hinted(model: nn.Module, ids: Tensor) -> Tensor:
    """Distil the best logits and the hidden states (TinyBERT)."""
    with torch.no_grad():
        hint = model.other.hidden(ids)
        best = model.other.lm_head(hint).topk(8, -1)
    seen = model.hidden(ids)
    made = model.lm_head(seen).log_softmax(-1).gather(-1, best.indices)
    soft = -(best.values.softmax(-1) * made).sum(-1).mean()
    return soft + F.mse_loss(seen, hint)


program("a_teachers_best_logits_and_states", "TinyBERT; top-k distillation",
        lambda: beside(Nano(depth=1), trained()), hinted)  # fmt: skip


class Ahead(Nano):
    """DeepSeek V3's second head: a block over the next embedding and the state."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Linear(64, 32, bias=False)
        self.further = models.NanoBlock()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.hidden(ids)
        first = F.cross_entropy(self.lm_head(x).mT, targets)
        both = torch.cat((x[:, :-1], models.rms(self.wte(targets[:, :-1]))), -1)
        y = self.further(self.joined(both), self.rope(both.shape[1]))
        second = F.cross_entropy(self.lm_head(models.rms(y)).mT, targets[:, 1:])
        return first + 0.3 * second


program("a_second_token_from_the_first", "DeepSeek V3: multi-token prediction", Ahead)


class Weighted(nn.Module):
    """Two tasks whose weights are learnt (Kendall et al.)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.second = Encoder(), nn.Linear(32, 1)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, step: int) -> Tensor:
        one = masked_loss(self.body, step)
        ids = text(seed=step)
        made = self.second(self.body(ids).mean(1))[:, 0]
        two = F.mse_loss(made, (ids % 4 == 0).float().mean(1))
        losses = torch.stack((one, two))
        return (losses * (-self.log_variance).exp() + self.log_variance).sum()


program("two_tasks_with_learnt_weights", "Kendall et al.: uncertainty", Weighted,
        lambda m, step: m(step), data=COUNT)  # fmt: skip


def mixed_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    share = float(torch.distributions.Beta(0.4, 0.4).sample())
    other = torch.randperm(len(x))
    made = model(share * x + (1 - share) * x[other])
    soft = [F.cross_entropy(made, one) for one in (y, y[other])]
    return share * soft[0] + (1 - share) * soft[1]


def half_labelled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """FixMatch: confident guesses of the rest are targets of a noisier view."""
    x, y = batch
    known = F.cross_entropy(model(x[:8]), y[:8])
    with torch.no_grad():
        sure, guess = model(x[8:]).softmax(-1).max(-1)
    made = F.cross_entropy(
        model(x[8:] + 0.3 * torch.randn_like(x[8:])), guess, reduction="none"
    )
    return known + (made * (sure > 0.8)).mean()


def with_adversaries(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """FGSM: the gradient of the input makes a harder input."""
    x, y = batch[0].requires_grad_(), batch[1]
    plain = F.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(plain, x, retain_graph=True)
    return plain + F.cross_entropy(model((x + 0.1 * slope.sign()).detach()), y)


for name, source, loss in (
    ("mixed_pairs_of_images", "mixup (Zhang et al.)", mixed_images),
    ("images_half_of_which_have_labels", "FixMatch (Sohn et al.)", half_labelled),
    ("images_made_harder_by_their_gradient", "FGSM (Goodfellow et al.)",
     with_adversaries),
):  # fmt: skip
    program(name, source, models.Patches, loss, data=list(pictures()))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return -grad


class TwoDomains(models.Patches):
    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(32, 2)

    def both(self, step: int) -> Tensor:
        x, y = parts.pictures(step, 32)
        where = torch.arange(32) % 2
        seen = self.features(x + 0.3 * where[:, None, None, None]).mean(1)
        apart = F.cross_entropy(self.domain(Reversed.apply(seen)), where)
        return F.cross_entropy(self.head(seen), y) + 0.1 * apart


program("a_gradient_that_is_reversed", "domain-adversarial training (Ganin et al.)",
        TwoDomains, lambda m, step: m.both(step), data=range(120))  # fmt: skip


class Denoiser(nn.Module):
    """A transformer of 16 patches that is told the time."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.time, self.leave = (
            nn.Linear(16, 32),
            nn.Linear(1, 32),
            nn.Linear(32, 16),
        )
        self.place = nn.Parameter(0.1 * torch.randn(16, 32))
        self.layers = nn.ModuleList(models.Layer() for _ in range(2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.enter(x) + self.place + self.time(t[:, None])[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def noisy(step: int) -> tuple[Tensor, Tensor, Tensor]:
    x = F.unfold(parts.pictures(step, 32)[0], 4, stride=4).mT
    return x, torch.randn_like(x), torch.rand(len(x))


def flow(model: nn.Module, step: int) -> Tensor:
    x, noise, t = noisy(step)
    at = t[:, None, None]
    return F.mse_loss(model((1 - at) * noise + at * x, t), x - noise)


def score(model: nn.Module, step: int) -> Tensor:
    x, noise, t = noisy(step)
    sigma = (0.05 * 20**t)[:, None, None]
    return (sigma * model(x + sigma * noise, t) + noise).square().mean()


def consistency(model: nn.Module, step: int) -> Tensor:
    """One step of the path leads where the next one does, without gradients."""
    x, noise, t = noisy(step)
    a, b = (one[:, None, None] for one in (t, (t - 0.1).clamp(min=0)))
    made = x + a * noise - a * model(x + a * noise, t)
    with torch.no_grad():
        wanted = x + b * noise - b * model(x + b * noise, b[:, 0, 0])
    return F.mse_loss(made, wanted) + F.mse_loss(model(x + noise, t * 0 + 1), noise)


for name, source, loss in (
    ("a_flow_from_noise_to_images", "flow matching (Lipman et al.)", flow),
    ("a_score_at_many_scales", "denoising score matching (Vincent)", score),
    ("a_consistency_of_steps", "consistency models (Song et al.)", consistency),
):
    program(name, source, Denoiser, loss, data=COUNT, average=True)


@control(source="DQN (Mnih et al.): a replay buffer, and a target that is copied")
def action_values_with_a_target_network(watch: Attach) -> None:
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    target, kept = frozen(model), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    state = torch.tensor([0.5, 0.0])
    for step in range(60):
        for _ in range(4):
            best = int(model(state).argmax())
            action = best if torch.rand(()) < 0.7 else int(torch.randint(2, ()))
            speed = 0.9 * state[1] + (0.1 if action else -0.1)
            after = torch.stack((state[0] + speed, speed))
            kept.append((state, action, -abs(float(after[0])), after))
            state = after if abs(after[0]) < 2 else torch.tensor([0.5, 0.0])
        drawn = [kept[int(i)] for i in torch.randint(len(kept), (16,))]
        states, actions, rewards, nexts = zip(*drawn, strict=True)
        with torch.no_grad():
            wanted = torch.tensor(rewards) + 0.9 * target(torch.stack(nexts)).amax(1)
        made = model(torch.stack(states)).gather(1, torch.tensor(actions)[:, None])
        optimizer.zero_grad()
        F.smooth_l1_loss(made[:, 0], wanted).backward()
        optimizer.step()
        if step % 10 == 9:
            target.load_state_dict(model.state_dict())


@control(source="WGAN (Arjovsky et al.): five critic steps, weights clipped by hand")
def a_critic_with_clipped_weights(watch: Attach) -> None:
    made = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 256))
    critic = nn.Sequential(nn.Linear(256, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    one = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
    two = torch.optim.RMSprop(made.parameters(), lr=5e-4)
    watch(made, two)
    for step in range(5 * STEPS):
        real = parts.pictures(step)[0].flatten(1)
        one.zero_grad()
        fake = made(torch.randn(16, 8)).detach()
        (critic(fake).mean() - critic(real).mean()).backward()
        one.step()
        with torch.no_grad():
            for weight in critic.parameters():
                weight.clamp_(-0.05, 0.05)
        if step % 5 == 4:
            two.zero_grad()
            (-critic(made(torch.randn(16, 8))).mean()).backward()
            two.step()


@control(source="scheduled sampling (Bengio et al.): some inputs are its own guesses")
def inputs_that_are_its_own_guesses(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            guess = model(ids).argmax(-1)[:, :-1]
        given = ids.clone()
        swap = torch.rand(guess.shape) < 0.15
        given[:, 1:] = torch.where(swap, guess, ids[:, 1:])
        return model(given[:, :-1], ids[:, 1:])

    run(Nano(), watch, loss, evaluate=nano_loss)


@control(source="chat with EOS as the separator of turns: only answers count")
def turns_of_a_chat(watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step).clamp(min=3)
        ids[:, [5, 11, 17, 23]] = EOS
        turn = (ids == EOS).cumsum(1) - (ids == EOS).long()
        labels = ids.masked_fill(turn % 2 == 0, IGNORED)
        return model(ids[:, :-1], labels[:, 1:].contiguous())

    run(Nano(), watch, loss, data=COUNT, schedule=loops.warm_cosine)


@control(source="TRPO's kind: a penalty on the divergence from the rollout's policy")
def several_updates_of_one_rollout(watch: Attach) -> None:
    model = trained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    watch(model, optimizer)
    for step in range(STEPS // 2):
        ids, reward = rollout(model, step)
        gain = (reward - reward.mean())[:, None]
        with torch.no_grad():
            old = taken(model, ids)
        for _ in range(2):
            new = taken(model, ids)
            optimizer.zero_grad()
            kept = ((old - new).exp() - 1 - (old - new)).mean()
            (0.1 * kept - ((new - old).exp() * gain).mean()).backward()
            optimizer.step()


@control(source="behaviour cloning with a chunk of actions (ACT)")
def chunks_of_actions(watch: Attach) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 16))

    def loss(model: nn.Module, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(step)
        x = torch.randn(32, 4, generator=rng)
        wanted = torch.stack([torch.sin(x + k) for k in range(4)], 1).flatten(1)
        return F.l1_loss(model(x), wanted)

    run(model, watch, loss, data=COUNT, average=True)


@control(source="temporal fusion transformers: quantiles of a series")
def quantiles_of_a_series(watch: Attach) -> None:
    class Forecast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.head = nn.Linear(1, 32), nn.Linear(32, 3)
            self.place = nn.Parameter(0.1 * torch.randn(24, 32))
            self.layers = nn.ModuleList(models.Layer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x[..., None]) + self.place
            bias = torch.zeros(24, 24).masked_fill(~models.causal(24), -1e9)
            for layer in self.layers:
                x = layer(x, bias)
            return self.head(x)

    def loss(model: nn.Module, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(step)
        phase = 6 * torch.rand(16, 1, generator=rng)
        series = torch.sin(torch.arange(25.0) / 3 + phase)
        miss = series[:, 1:, None] - model(series[:, :-1])
        q = torch.tensor([0.1, 0.5, 0.9])
        return torch.maximum(q * miss, (q - 1) * miss).mean()

    run(Forecast(), watch, loss, data=COUNT, clip=1.0)


@control(source="own: a table of categories and numbers, rows of a saved epoch again")
def columns_as_tokens(watch: Attach) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.names = nn.ModuleList(nn.Embedding(8, 32) for _ in range(4))
            self.scales = nn.Parameter(torch.randn(3, 32) / 6)
            self.layers = nn.ModuleList(models.Layer() for _ in range(2))
            self.head = nn.Linear(32, 1)

        def forward(self, kinds: Tensor, numbers: Tensor) -> Tensor:
            seen = [one(kinds[:, i]) for i, one in enumerate(self.names)]
            x = torch.cat((torch.stack(seen, 1), numbers[..., None] * self.scales), 1)
            for layer in self.layers:
                x = layer(x)
            return self.head(x.mean(1))[:, 0]

    rng = torch.Generator().manual_seed(3)
    kinds = torch.randint(8, (160, 4), generator=rng)
    numbers = torch.randn(160, 3, generator=rng)
    y = (kinds[:, 0] > 3).float() + numbers[:, 0]

    def loss(model: nn.Module, step: int) -> Tensor:
        at = torch.arange(32) + 32 * (step % 5)
        return F.huber_loss(model(kinds[at], numbers[at]), y[at])

    run(Table(), watch, loss, data=range(60), schedule=loops.warm_cosine)
