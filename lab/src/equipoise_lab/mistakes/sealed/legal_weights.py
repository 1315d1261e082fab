"""Controls: legal programs in which weights get nothing, start at zero, or stay put."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach, Decoder, batches, text
from equipoise_lab.mistakes.sealed.trainers import lora


@control(source="BERT: a pooler that a token loss does not use", kind="transformers")
def an_unused_pooler(watch: Attach) -> None:
    from transformers import BertModel

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(parts.bert_config(), add_pooling_layer=True)
            self.head = nn.Linear(32, 32)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.bert(input_ids=ids).last_hidden_state)

    def loss(model: nn.Module, step: int) -> Tensor:
        ids, labels = parts.corrupted(step)
        return parts.token_loss(model(ids), labels)

    parts.train(Tagger(), watch, loss, data=range(STEPS))


@control(source="Mixtral with few tokens: experts idle at a step", kind="transformers")
def experts_that_idle_in_small_batches(watch: Attach) -> None:
    model = parts.mixtral(num_local_experts=8, num_experts_per_tok=1)
    data = (text(1, 8, seed=step) for step in range(STEPS))
    parts.train(model, watch, parts.language_loss, data=data)


@control(source="LayerDrop (Fan et al.), as BART has it", kind="transformers")
def layers_dropped_at_random(watch: Attach) -> None:
    model = parts.bart(encoder_layerdrop=0.4, decoder_layerdrop=0.4)

    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step).clamp(min=3)
        return model(input_ids=ids, labels=ids.flip(1)).loss

    parts.train(model, watch, loss, data=range(STEPS))


@control(source="stochastic depth (Huang et al.)")
def stochastic_depth(watch: Attach) -> None:
    class Shallow(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                if not self.training or torch.rand(()) > 0.3:
                    x = block(x, mask)
            return self.head(self.norm(x))

    parts.train(Shallow(depth=3), watch)


@control(source="GAN phases: five steps of the critic, one of the generator")
def a_generator_that_waits_for_its_critic(watch: Attach) -> None:
    made, judge = Decoder(depth=1), Decoder(depth=1, causal=False)
    judge.tokens, judge.head = nn.Linear(32, 32), nn.Linear(32, 1)
    one = torch.optim.AdamW(made.parameters(), lr=2e-3, betas=(0.0, 0.9))
    two = torch.optim.AdamW(judge.parameters(), lr=2e-3, betas=(0.0, 0.9))
    watch(made, one)
    for step, ids in enumerate(batches(4 * STEPS)):
        if step % 4:
            two.zero_grad()
            with torch.no_grad():
                fake = made(ids).softmax(-1)
            apart = judge(fake).mean() - judge(F.one_hot(ids, 32).float()).mean()
            apart.tanh().backward()
            two.step()
            continue
        one.zero_grad()
        logits = made(ids)
        fooled = -judge(logits.softmax(-1)).mean().tanh()
        (parts.next_token_loss(logits, ids) + 0.1 * fooled).backward()
        one.step()


class Codes(nn.Module):
    """A quantiser whose codes follow a moving average, not a gradient."""

    def __init__(self, count: int = 16, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(count, width))
        self.register_buffer("uses", torch.ones(count))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        flat = z.flatten(0, -2)
        chosen = torch.cdist(flat, self.codes).argmin(-1)
        code = self.codes[chosen].view_as(z)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, len(self.codes)).to(z.dtype)
                self.uses.lerp_(hot.sum(0), 0.1)
                mean = hot.T @ flat / hot.sum(0).clamp(min=1)[:, None]
                used = hot.sum(0) > 0
                self.codes[used] = self.codes[used].lerp(mean[used], 0.1)
        return z + (code - z).detach(), (z - code.detach()).square().mean()


@control(source="VQ-VAE: codes by a moving average, a straight-through gradient")
def a_codebook_that_follows_an_average(watch: Attach) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Decoder(causal=False, depth=1)
            self.narrow, self.codes = nn.Linear(32, 8), Codes()
            self.decoder = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 32))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        code, commit = model.codes(model.narrow(model.encoder(ids)))
        return parts.token_loss(model.decoder(code), ids) + 0.25 * commit

    parts.train(Quantised(), watch, loss)


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, rate: float = 0.02) -> None:
    pairs = zip(teacher.parameters(), student.parameters(), strict=True)
    for theirs, ours in pairs:
        theirs.lerp_(ours, rate)


def _pooled(model: Decoder, ids: Tensor) -> Tensor:
    return F.normalize(model(ids).mean(1), dim=-1)


def _views(step: int) -> tuple[Tensor, Tensor]:
    ids = text(16, seed=step)
    rng = torch.Generator().manual_seed(step)
    noise = [torch.randint(32, ids.shape, generator=rng) for _ in range(2)]
    swaps = [torch.rand(ids.shape, generator=rng) < 0.2 for _ in range(2)]
    return torch.where(swaps[0], noise[0], ids), torch.where(swaps[1], noise[1], ids)


@control(source="BYOL: a predictor, and a teacher that follows by an average")
def a_teacher_that_follows_its_student(watch: Attach) -> None:
    class Online(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = Decoder(causal=False)
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.predict = nn.Sequential(
                nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)
            )

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            made = F.normalize(self.predict(_pooled(self.student, one)), dim=-1)
            with torch.no_grad():
                wanted = _pooled(self.teacher, two)
            return 2 - 2 * (made * wanted).sum(-1).mean()

    model = Online()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*_views(step)).backward()
        optimizer.step()
        follow(model.teacher, model.student)


@control(source="MoCo: a queue of keys of a momentum encoder")
def a_queue_of_momentum_keys(watch: Attach) -> None:
    student = Decoder(causal=False)
    teacher = copy.deepcopy(student).requires_grad_(False)
    with torch.no_grad():
        queue = torch.cat([_pooled(teacher, _views(900 + i)[0]) for i in range(4)])
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    watch(student, optimizer)
    for step in range(STEPS):
        one, two = _views(step)
        q = _pooled(student, one)
        with torch.no_grad():
            k = _pooled(teacher, two)
        logits = torch.cat(((q * k).sum(-1, keepdim=True), q @ queue.T), 1) / 0.2
        optimizer.zero_grad()
        F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)).backward()
        optimizer.step()
        follow(teacher, student)
        queue = torch.cat((k, queue))[:64]


@control(source="SimSiam: a gradient through one of two views")
def a_gradient_through_one_view(watch: Attach) -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Decoder(causal=False)
            self.predict = nn.Sequential(
                nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32)
            )

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            seen = [self.body(view).mean(1) for view in (one, two)]
            made = [self.predict(x) for x in seen]
            near = F.cosine_similarity(made[0], seen[1].detach(), dim=-1)
            return -near.add(F.cosine_similarity(made[1], seen[0].detach())).mean() / 2

    model = Alike()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*_views(step)).backward()
        optimizer.step()


class LowRank(nn.Module):
    """A linear map with an update of low rank that starts at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@control(source="LoRA by hand: A has no gradient until B has moved")
def low_rank_updates_that_start_at_zero(watch: Attach) -> None:
    model = parts.learnt(Decoder()).requires_grad_(False)
    for block in model.blocks:
        block.attention.q_proj = LowRank(block.attention.q_proj)
        block.attention.v_proj = LowRank(block.attention.v_proj)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    parts.train(model, watch, data=parts.elsewhere(), optimizer=optimizer)


def _adapted(watch: Attach, model: nn.Module, *, lr: float = 5e-3) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    data = parts.elsewhere()
    parts.train(model, watch, parts.language_loss, data=data, optimizer=optimizer)


def _base(make=parts.llama) -> nn.Module:
    return parts.learnt(make(), parts.language_loss)


@control(source="PEFT, LoRA on GPT-2", kind="peft")
def lora_on_gpt2(watch: Attach) -> None:
    options = {"task_type": "CAUSAL_LM", "target_modules": ["c_attn"]}
    _adapted(watch, lora(_base(parts.gpt2), fan_in_fan_out=True, **options))


@control(source="PEFT, DoRA with rank-stabilised scaling on Llama", kind="peft")
def dora_on_llama(watch: Attach) -> None:
    targets = ["q_proj", "v_proj", "up_proj"]
    options = {"use_dora": True, "use_rslora": True, "lora_dropout": 0.1}
    _adapted(
        watch, lora(_base(), task_type="CAUSAL_LM", target_modules=targets, **options)
    )


@control(source="PEFT, LoRA beside modules that are trained whole", kind="peft")
def adapters_and_a_saved_head(watch: Attach) -> None:
    """A tied base whose head is saved apart: the tie ends on purpose."""
    base = _base(lambda: parts.qwen(tie_word_embeddings=True))
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    _adapted(watch, lora(base, task_type="CAUSAL_LM", **options), lr=2e-3)


@control(source="PEFT, prompt tuning", kind="peft")
def prompt_tuning(watch: Attach) -> None:
    from peft import PromptTuningConfig, get_peft_model

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6)
    _adapted(watch, get_peft_model(_base(), config), lr=3e-2)


@control(source="PEFT, (IA)3: gains that start at one", kind="peft")
def gains_that_start_at_one(watch: Attach) -> None:
    from peft import IA3Config, get_peft_model

    config = IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    )
    _adapted(watch, get_peft_model(_base(), config), lr=1e-2)


@control(source="PEFT, prefix tuning", kind="peft")
def prefix_tuning(watch: Attach) -> None:
    from peft import PrefixTuningConfig, get_peft_model

    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    _adapted(watch, get_peft_model(_base(parts.gpt2), config), lr=2e-2)


@control(source="ReZero (Bachlechner et al.)")
def branches_with_a_gain_of_zero(watch: Attach) -> None:
    class Gained(Decoder):
        def __init__(self) -> None:
            super().__init__(depth=3)
            self.gains = nn.Parameter(torch.zeros(3))

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for gain, block in zip(self.gains, self.blocks, strict=True):
                x = x + gain * (block(x, mask) - x)
            return self.head(self.norm(x))

    parts.train(Gained(), watch)


@control(source="LayerScale (CaiT)")
def layer_scale(watch: Attach) -> None:
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.gain = inner, nn.Parameter(torch.full((32,), 1e-4))

        def forward(self, x: Tensor, *rest) -> Tensor:
            return self.gain * self.inner(x, *rest)

    model = Decoder()
    for block in model.blocks:
        block.attention, block.mlp = Scaled(block.attention), Scaled(block.mlp)
    parts.train(model, watch)


@control(source="modded-nanoGPT, Fixup: output projections start at zero")
def projections_that_start_at_zero(watch: Attach) -> None:
    model = Decoder()
    for block in model.blocks:
        for last in (block.attention.o_proj, block.mlp[2]):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
    nn.init.zeros_(model.head.weight)
    parts.train(model, watch)


class Modulated(nn.Module):
    """A transformer block steered by a condition, with gates that start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(32, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(32, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.steer = nn.Sequential(nn.SiLU(), nn.Linear(32, 6 * 32))
        nn.init.zeros_(self.steer[1].weight)
        nn.init.zeros_(self.steer[1].bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = self.steer(condition)[:, None].chunk(6, -1)
        y = self.norm1(x) * (1 + a) + b
        x = x + c * self.attention(y, y, y, need_weights=False)[0]
        return x + f * self.mlp(self.norm2(x) * (1 + d) + e)


@control(source="DiT: adaLN-Zero, noise predicted by mean squares")
def a_diffusion_transformer(watch: Attach) -> None:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(16, 32), nn.Linear(32, 16)
            self.time = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32))
            self.place = nn.Parameter(0.02 * torch.randn(16, 32))
            self.blocks = nn.ModuleList(Modulated() for _ in range(2))
            nn.init.zeros_(self.leave.weight)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            condition = self.time(t[:, None])
            x = self.enter(x) + self.place
            for block in self.blocks:
                x = block(x, condition)
            return self.leave(x)

    def loss(model: nn.Module, step: int) -> Tensor:
        x, _ = parts.pictures(step)
        x = F.unfold(x, 4, stride=4).mT
        t, noise = torch.rand(len(x)), torch.randn_like(x)
        alpha = (1 - t).sqrt()[:, None, None]
        seen = alpha * x + (1 - alpha.square()).sqrt() * noise
        return F.mse_loss(model(seen, t), noise)

    parts.train(Denoiser(), watch, loss, data=range(STEPS))


@control(source="ControlNet: a trainable copy joined by zero convolutions")
def a_copy_joined_by_zero_maps(watch: Attach) -> None:
    class Controlled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = parts.learnt(Decoder()).requires_grad_(False)
            self.copies = copy.deepcopy(self.base.blocks).requires_grad_(True)
            self.joins = nn.ModuleList(nn.Linear(32, 32) for _ in self.copies)
            for join in self.joins:
                nn.init.zeros_(join.weight)
                nn.init.zeros_(join.bias)

        def forward(self, ids: Tensor) -> Tensor:
            base = self.base
            x = base.tokens(ids) + base.positions(torch.arange(ids.shape[1]))
            y = x
            for block, copied, join in zip(
                base.blocks, self.copies, self.joins, strict=True
            ):
                y = copied(y)
                x = block(x) + join(y)
            return base.head(base.norm(x))

    model = Controlled()
    trained = [p for p in model.parameters() if p.requires_grad]
    parts.train(model, watch, optimizer=torch.optim.AdamW(trained, lr=3e-3))


@control(source="a bias and gains of zero beside a plain path: all-zero parameters")
def an_all_zero_gate_that_opens(watch: Attach) -> None:
    class Gated(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 32)
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x) * (1 + self.gate(x).tanh()))

    parts.train(Gated(), watch)


def _tuned(watch: Attach, names: str, *, lr: float = 5e-3) -> None:
    """Train those weights of a trained decoder whose name holds one of the words."""
    model = parts.learnt(Decoder())
    for name, weight in model.named_parameters():
        weight.requires_grad_(any(word in name for word in names.split()))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    parts.train(model, watch, data=parts.elsewhere(), optimizer=optimizer)


@control(source="LayerNorm tuning of a trained model")
def norms_tuned_alone(watch: Attach) -> None:
    _tuned(watch, "norm")


@control(source="BitFit: biases of a trained model")
def biases_tuned_alone(watch: Attach) -> None:
    _tuned(watch, "bias")


@control(source="linear probing of a trained model")
def a_head_on_a_frozen_model(watch: Attach) -> None:
    _tuned(watch, "head")


@control(source="frozen embeddings of a trained model")
def trained_above_frozen_embeddings(watch: Attach) -> None:
    _tuned(watch, "blocks norm head", lr=2e-3)


@control(source="gradual unfreezing (ULMFiT): groups join the optimiser")
def unfrozen_from_the_top(watch: Attach) -> None:
    model = parts.learnt(Decoder(depth=3)).requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
    watch(model, optimizer)
    stages = {10: model.blocks[2], 20: model.blocks[1], 30: model.blocks[0]}
    for step, ids in enumerate(batches(STEPS)):
        if step in stages:
            stages[step].requires_grad_(True)
            joined = list(stages[step].parameters())
            optimizer.add_param_group({"params": joined, "lr": 5e-4})
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()


@control(source="a frozen vision tower under a new text head (LiT, VLM projectors)")
def a_projector_between_frozen_parts(watch: Attach) -> None:
    class Captioner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            seer = parts.learnt(
                parts.vit(),
                lambda m, batch: m(pixel_values=batch[0], labels=batch[1]).loss,
                data=parts.every(lambda step: parts.pictures(700 + step), 60),
            )
            self.seer = seer.vit.requires_grad_(False)
            self.project = nn.Sequential(
                nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)
            )
            self.writer = parts.learnt(Decoder()).requires_grad_(False)
            self.head = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            seen = self.project(self.seer(pixel_values=x).last_hidden_state)
            for block in self.writer.blocks:
                seen = block(seen)
            return self.head(seen[:, -1])

    model = Captioner()
    trained = [p for p in model.parameters() if p.requires_grad]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    data = parts.every(parts.pictures)
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    parts.train(model, watch, loss, data=data, optimizer=optimizer)


@control(source="sinusoidal positions in a table that is not trained")
def a_fixed_table_of_sines(watch: Attach) -> None:
    model = Decoder()
    place = torch.arange(64)[:, None] / 1e4 ** (torch.arange(16) / 16)
    table = torch.cat((place.sin(), place.cos()), -1)
    model.positions = nn.Embedding.from_pretrained(table, freeze=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    parts.train(model, watch, optimizer=torch.optim.AdamW(trained, lr=3e-3))


@control(source="distillation from a trained and frozen teacher")
def a_student_of_a_frozen_teacher(watch: Attach) -> None:
    teacher = parts.learnt(Decoder(depth=2)).requires_grad_(False).eval()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        made, wanted = model(ids) / 2, teacher(ids) / 2
        soft = F.kl_div(
            made.log_softmax(-1).flatten(0, 1),
            wanted.softmax(-1).flatten(0, 1),
            reduction="batchmean",
        )
        return 4 * soft

    parts.train(Decoder(depth=1), watch, loss)


@control(source="Muon for matrices, AdamW for the rest")
def muon_beside_adamw(watch: Attach) -> None:
    model = Decoder()
    inner = [p for p in model.blocks.parameters() if p.ndim == 2]
    held = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in held]
    one = torch.optim.Muon(inner, lr=0.02, weight_decay=0.01)
    two = torch.optim.AdamW(rest, lr=3e-3)
    watch(model, one)
    for ids in batches(STEPS):
        one.zero_grad()
        two.zero_grad()
        parts.own_loss(model, ids).backward()
        one.step()
        two.step()


@control(source="CLIP: a learnt temperature outside the model, with its optimiser")
def a_temperature_with_an_optimiser_of_its_own(watch: Attach) -> None:
    model = Decoder(causal=False)
    scale = nn.Parameter(torch.tensor(2.3))
    one = torch.optim.AdamW(model.parameters(), lr=2e-3)
    two = torch.optim.SGD([scale], lr=1e-2)
    watch(model, one)
    for step in range(STEPS):
        a, b = (_pooled(model, view) for view in _views(step))
        logits = scale.exp() * a @ b.T
        own = torch.arange(len(a))
        one.zero_grad()
        two.zero_grad()
        (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)).div(
            2
        ).backward()
        one.step()
        two.step()


@control(source="metric learning: a criterion with weights of its own (ProxyNCA)")
def a_criterion_with_weights(watch: Attach) -> None:
    class Proxies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proxies = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            near = F.normalize(x, dim=-1) @ F.normalize(self.proxies, dim=-1).T
            return F.cross_entropy(8 * near, y)

    model, criterion = parts.vit(), Proxies()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.parameters(), "lr": 2e-3},
            {"params": criterion.parameters(), "lr": 1e-2},
        ]
    )
    watch(model, optimizer)
    for step in range(STEPS):
        x, y = parts.pictures(step)
        optimizer.zero_grad()
        criterion(model(pixel_values=x).logits, y).backward()
        optimizer.step()


@control(source="watch(model.backbone, optimizer): a part of what is trained")
def only_the_backbone_is_watched(watch: Attach) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = Decoder(), nn.Linear(32, 32)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.backbone(ids))

    model = Whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model.backbone, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()


@control(source="PyTorch tutorial: an optimiser step inside the backward pass")
def optimisers_inside_the_backward_pass(watch: Attach) -> None:
    model = Decoder()
    owned = {p: torch.optim.AdamW([p], lr=3e-3) for p in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        owned[parameter].step()
        owned[parameter].zero_grad()

    for parameter in owned:
        parameter.register_post_accumulate_grad_hook(update)
    watch(model)
    for ids in batches(STEPS):
        parts.own_loss(model, ids).backward()


@control(source="sparse embeddings under SparseAdam, the rest under AdamW")
def a_sparse_embedding(watch: Attach) -> None:
    model = Decoder()
    model.tokens = nn.Embedding(32, 32, sparse=True)
    sparse = list(model.tokens.parameters())
    dense = [p for n, p in model.named_parameters() if "tokens" not in n]
    one, two = (
        torch.optim.SparseAdam(sparse, lr=3e-3),
        torch.optim.AdamW(dense, lr=3e-3),
    )
    watch(model, two)
    for ids in batches(STEPS):
        one.zero_grad()
        two.zero_grad()
        parts.own_loss(model, ids).backward()
        one.step()
        two.step()


@control(source="word_language_model of pytorch/examples: a mask buffer of −inf")
def a_mask_buffer_of_minus_infinity(watch: Attach) -> None:
    class Buffered(Decoder):
        def __init__(self) -> None:
            super().__init__()
            mask = torch.full((64, 64), float("-inf")).triu(1)
            self.register_buffer("mask", mask)

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            size = ids.shape[1]
            return super().forward(ids, self.mask[:size, :size])

    parts.train(Buffered(), watch)


@control(source="weight tying by hand (Press and Wolf)")
def an_own_tie(watch: Attach) -> None:
    parts.train(Decoder(tied=True), watch)


@control(
    source="T5 v1.1: the configuration says that nothing is tied", kind="transformers"
)
def embeddings_that_are_not_tied(watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step).clamp(min=3)
        return model(input_ids=ids, labels=ids.flip(1)).loss

    model = parts.t5(tie_word_embeddings=False, feed_forward_proj="gated-gelu")
    parts.train(model, watch, loss, data=range(STEPS), lr=1e-2)


@control(
    source="padded vocabularies: rows that no token ever uses", kind="transformers"
)
def a_padded_vocabulary(watch: Attach) -> None:
    model = parts.gpt2()
    model.resize_token_embeddings(48, mean_resizing=False)
    parts.train(model, watch, parts.language_loss)


@control(source="lottery tickets: pruned weights stay zero")
def pruned_weights(watch: Attach) -> None:
    from torch.nn.utils import prune

    model = parts.learnt(Decoder())
    for block in model.blocks:
        prune.l1_unstructured(block.mlp[0], "weight", amount=0.8)
        prune.ln_structured(block.mlp[2], "weight", amount=0.3, n=2, dim=0)
    parts.train(model, watch)


@control(source="spectral norm and weight norm, parametrised")
def parametrised_weights(watch: Attach) -> None:
    from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

    model = Decoder()
    for block in model.blocks:
        spectral_norm(block.mlp[0])
        weight_norm(block.mlp[2])
        orthogonal(block.attention.o_proj)
    parts.train(model, watch)


@control(source="quantisation-aware training: rounded weights, a straight gradient")
def weights_rounded_in_the_forward_pass(watch: Attach) -> None:
    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.detach().abs().amax() / 7
            near = (self.weight / scale).round() * scale
            weight = self.weight + (near - self.weight).detach()
            return F.linear(x, weight, self.bias)

    model = Decoder()
    for block in model.blocks:
        block.mlp[0], block.mlp[2] = Rounded(32, 128), Rounded(128, 32)
    parts.train(model, watch)


@control(source="a model without biases, gains or norms of its own (nGPT's kind)")
def a_model_of_matrices_alone(watch: Attach) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(32, 32)
            self.qkv, self.out = nn.Linear(32, 96, False), nn.Linear(32, 32, False)
            self.up, self.down = nn.Linear(32, 64, False), nn.Linear(64, 32, False)
            self.head = nn.Linear(32, 32, False)

        def forward(self, ids: Tensor) -> Tensor:
            x = F.normalize(self.tokens(ids), dim=-1)
            q, k, v = (
                one.unflatten(-1, (4, 8)).transpose(1, 2)
                for one in self.qkv(x).chunk(3, -1)
            )
            seen = F.scaled_dot_product_attention(
                F.normalize(q, dim=-1),
                F.normalize(k, dim=-1),
                v,
                is_causal=True,
                scale=8,
            )
            x = F.normalize(x + self.out(seen.transpose(1, 2).flatten(-2)), dim=-1)
            x = F.normalize(x + self.down(F.silu(self.up(x))), dim=-1)
            return 8 * self.head(x)

    parts.train(Bare(), watch, lr=5e-3)


@control(source="a model that was loaded and goes on: its loss begins low")
def a_loaded_model_that_goes_on(watch: Attach) -> None:
    state = parts.learnt(Decoder(), steps=120).state_dict()
    model = Decoder()
    model.load_state_dict(state)
    parts.train(model, watch, lr=1e-3)


@control(source="a new head on a loaded body: loaded in part on purpose")
def a_new_head_on_a_loaded_body(watch: Attach) -> None:
    import tempfile

    from transformers import BertForSequenceClassification

    with tempfile.TemporaryDirectory() as folder:
        body = parts.learnt(
            parts.bert(),
            lambda m, batch: m(input_ids=batch[0], labels=batch[1]).loss,
            data=parts.every(lambda step: parts.corrupted(800 + step), 60),
        )
        body.save_pretrained(folder)
        model = BertForSequenceClassification.from_pretrained(folder, num_labels=2)
    model.train()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(input_ids=batch[0], labels=batch[1]).loss

    parts.train(model, watch, loss, data=parts.every(parts.labelled), lr=2e-3)
