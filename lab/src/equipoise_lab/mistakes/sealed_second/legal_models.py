"""Controls: architectures that look odd, and models of which a part is trained.

Axes, in this file:  B batch · T token · C channel · H head · D head channel ·
V vocabulary · E expert.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import EOS, IGNORED, STEPS, Attach, text
from equipoise_lab.mistakes.sealed_second import loops, models
from equipoise_lab.mistakes.sealed_second.forward import (
    masked_loss,
    pictures,
    with_attention,
)
from equipoise_lab.mistakes.sealed_second.loops import by_class, program, run
from equipoise_lab.mistakes.sealed_second.models import (
    Encoder,
    Nano,
    NanoAttention,
    causal,
    nano_loss,
    rms,
)


class TwoStreams(Nano):
    """Hyper-connections: two residual streams, mixed by weights that begin plainly."""

    def __init__(self) -> None:
        super().__init__()
        self.take = nn.Parameter(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        self.give = nn.Parameter(torch.ones(2, 2))
        self.mix = nn.Parameter(torch.eye(2).repeat(2, 1, 1))

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x, rope = rms(self.wte(ids)), self.rope(ids.shape[1])
        streams = torch.stack((x, x))
        for number, block in enumerate(self.blocks):
            given = torch.einsum("s,sbtc->btc", self.take[number], streams)
            made = block(given, rope, mask) - given
            streams = torch.einsum("rs,sbtc->rbtc", self.mix[number], streams)
            streams = streams + self.give[number][:, None, None, None] * made
        return rms(streams.sum(0))


class WithValues(Nano):
    """modded-nanoGPT: value embeddings and skips, whose weights begin at 0 or 1."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.values = nn.Embedding(32, 32)
        self.lambdas = nn.Parameter(torch.zeros(2))
        self.skips = nn.Parameter(torch.ones(2))
        for block in self.blocks:
            nn.init.zeros_(block.attn.c_proj.weight)
            nn.init.zeros_(block.mlp.c_proj.weight)

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        first = rms(self.wte(ids))
        x, rope, seen = first, self.rope(ids.shape[1]), []
        for number, block in enumerate(self.blocks):
            if number < 2:
                seen.append(x)
            else:
                x = x + self.skips[number - 2] * seen.pop()
                x = x + self.lambdas[number - 2] * self.values(ids)
            x = block(x, rope, mask)
        return rms(x)


class Shared(Nano):
    """ALBERT with adaptive halting (ACT): one block, each token stops in its time."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.halt = nn.Linear(32, 1)

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x, rope = rms(self.wte(ids)), self.rope(ids.shape[1])
        out, left = torch.zeros_like(x), torch.ones_like(x[..., :1])
        for last in (False, False, True):
            x = self.blocks[0](x, rope, mask)
            p = left if last else left * self.halt(x).sigmoid()
            out, left = out + p * x, left - p
        return rms(out)


class Exits(Nano):
    """A loss after each block, by the same head."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x, rope, total = rms(self.wte(ids)), self.rope(ids.shape[1]), 0.0
        for block in self.blocks:
            x = block(x, rope)
            total = total + F.cross_entropy(self.lm_head(rms(x)).mT, targets)
        return total / len(self.blocks)


class Shifting(Nano):
    """RWKV's token shift: each channel mixes a token with the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(32))

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = rms(self.wte(ids))
        x = torch.lerp(F.pad(x, (0, 0, 1, -1)), x, self.shift)
        for block in self.blocks:
            x = block(x, self.rope(ids.shape[1]), mask)
        return rms(x)


class Registers(Nano):
    """Four learnt tokens stand before every row and are cut off again."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(0.1 * torch.randn(4, 32))

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = torch.cat((self.extra.expand(len(ids), -1, -1), rms(self.wte(ids))), 1)
        for block in self.blocks:
            x = block(x, self.rope(x.shape[1]), mask)
        return rms(x[:, 4:])


class Bytes(Nano):
    """MegaByte: a model of patches of four gives a small one its context."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(128, 32, bias=False)

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = rms(self.wte(F.pad(ids, (4, 0))[:, : ids.shape[1] // 4 * 4]))
        large = self.narrow(x.unflatten(1, (-1, 4)).flatten(2))
        large = self.blocks[0](large, self.rope(large.shape[1]))
        large = large.repeat_interleave(4, 1)
        small = rms(self.wte(F.pad(ids, (1, 0))[:, :-1])) + large
        near = torch.arange(small.shape[1]) // 4
        seen = causal(len(near)) & (near[:, None] == near)
        return rms(self.blocks[1](small, self.rope(len(near)), seen))


def in_place(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of a model that moves its own input by one place."""
    return F.cross_entropy(model(ids).mT, ids)


class Memory(Nano):
    """Product keys: a feed-forward that looks up eight of 256 values."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(32, 32, bias=False)
        self.keys = nn.Parameter(torch.randn(2, 16, 16) / 4)
        self.stored = nn.EmbeddingBag(256, 32, mode="sum")

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().hidden(ids, mask)
        halves = self.query(x).unflatten(-1, (2, 16))
        a, b = torch.einsum("btsd,skd->sbtk", halves, self.keys).unbind(0)
        scores = (a[..., :, None] + b[..., None, :]).flatten(-2)
        best, at = scores.topk(8, -1)
        found = self.stored(
            at.flatten(0, 1), per_sample_weights=best.softmax(-1).flatten(0, 1)
        )
        return rms(x + found.view_as(x))


for name, source, make, loss in (
    ("two_residual_streams", "hyper-connections (Zhu et al.)", TwoStreams, nano_loss),
    ("values_of_their_own_embedding", "modded-nanoGPT", WithValues, nano_loss),
    ("tokens_that_stop_in_their_time", "ACT (Graves); ALBERT", Shared, nano_loss),
    ("an_exit_after_each_block", "early exits (LayerSkip)", Exits, nano_loss),
    ("a_token_shift", "RWKV (Peng et al.)", Shifting, nano_loss),
    ("tokens_that_are_registers", "registers (Darcet et al.)", Registers, nano_loss),
    ("patches_of_four_bytes", "MegaByte (Yu et al.)", Bytes, in_place),
    ("a_memory_of_product_keys", "Lample et al.; Memory layers", Memory, nano_loss),
    ("a_hybrid_of_linear_attention", "Qwen3-Next's kind", models.Hybrid, nano_loss),
    ("queries_and_keys_normalised", "nanochat", Nano, nano_loss),
):
    program(name, source, make, loss, schedule=loops.warm_cosine, clip=1.0,
            evaluate=loss)  # fmt: skip


class OneKey(NanoAttention):
    """Multi-query attention: one head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.c_k, self.c_v = (nn.Linear(32, 8, bias=False) for _ in range(2))

    def forward(self, x, rope, mask=None):
        q = self.c_q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.c_k(x)[:, None], self.c_v(x)[:, None]
        q, k = rms(models.turned(q, *rope)), rms(models.turned(k, *rope))
        out = F.scaled_dot_product_attention(
            q, k.expand_as(q), v.expand_as(q), is_causal=True
        )
        return self.c_proj(out.transpose(1, 2).flatten(-2))


class Difference(NanoAttention):
    """Differential attention: one softmax less a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.tensor(0.3))

    def attend(self, q, k, v, mask):
        hidden = ~causal(q.shape[-2])
        a, b = (
            (x @ y.mT / 2).masked_fill(hidden, -1e9).softmax(-1)
            for x, y in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        return (a - self.part * b) @ v


class Gated(NanoAttention):
    """Qwen3-Next's output gate, a value for each channel of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 32)

    def forward(self, x, rope, mask=None):
        self.opened = self.gate(x).sigmoid().unflatten(-1, (4, 8)).transpose(1, 2)
        return super().forward(x, rope, mask)

    def attend(self, q, k, v, mask):
        return super().attend(q, k, v, mask) * self.opened


class Sink(NanoAttention):
    """A learnt sink beside the keys of each head, whose share goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4))

    def attend(self, q, k, v, mask):
        scores = (q @ k.mT / 8**0.5).masked_fill(~causal(q.shape[-2]), -1e9)
        sink = self.sinks[:, None, None].expand(len(q), -1, q.shape[-2], 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ v


class Scaled(NanoAttention):
    """Scalable softmax: scores grow with the logarithm of the number of keys."""

    def attend(self, q, k, v, mask):
        count = torch.arange(1, q.shape[-2] + 1)[:, None]
        q = q * (1 + 0.4 * count.log())
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Retained(NanoAttention):
    """RetNet: a decay for each head in place of a softmax."""

    def attend(self, q, k, v, mask):
        place = torch.arange(q.shape[-2])
        far = (place[:, None] - place).clamp(min=0)
        decay = (1 - 2.0 ** -torch.arange(2, 6))[:, None, None] ** far
        return rms((q @ k.mT / 8**0.5 * decay * causal(len(place))) @ v)


class Global(NanoAttention):
    """A causal window of six, and the first two tokens for everyone."""

    def attend(self, q, k, v, mask):
        place = torch.arange(q.shape[-2])
        near = (place[:, None] - place < 6) | (place < 2)
        seen = near & causal(len(place))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class Complex(NanoAttention):
    """Llama's first code: pairs of channels are complex numbers."""

    def forward(self, x, rope, mask=None):
        turn = torch.complex(*rope)
        q, k, v = (
            one(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for one in (self.c_q, self.c_k, self.c_v)
        )
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turn
            ).flatten(-2)
            for y in (q, k)
        )
        return self.c_proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(-2))


class HalfTables(NanoAttention):
    """nanochat: angles in fp32, their cosines and sines kept in bf16."""

    def forward(self, x, rope, mask=None):
        cos, sin = (one.bfloat16().float() for one in rope)
        return super().forward(x, (cos, sin), mask)


for name, source, make in (
    ("one_head_of_keys", "multi-query attention (Shazeer)", OneKey),
    ("one_softmax_less_another", "differential attention (Ye et al.)", Difference),
    ("a_gate_on_what_attention_gives", "Qwen3-Next", Gated),
    ("sinks_beside_the_keys", "gpt-oss, by hand", Sink),
    ("scores_that_grow_with_the_row", "scalable softmax (Nakanishi)", Scaled),
    ("retention", "RetNet (Sun et al.)", Retained),
    ("a_window_and_two_tokens_for_all", "StreamingLLM, Longformer", Global),
    ("rotary_by_complex_numbers", "Llama", Complex),
    ("tables_of_sines_kept_in_bf16", "nanochat", HalfTables),
    ("keys_and_values_of_a_latent", "MLA (DeepSeek V2)", models.Latent),
):
    program(name, source, lambda make=make: with_attention(make), clip=1.0)


class Mixed(Encoder):
    """MLP-Mixer, FNet: tokens are mixed without any attention."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make = {"fourier": Fourier, "mixer": Mixer, "pool": Pool}[kind]
        self.layers = nn.ModuleList(models.Layer(attention=make()) for _ in range(2))


class Fourier(nn.Module):
    def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        return torch.fft.fft2(x).real / 8


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))

    def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        return self.tokens(x.mT).mT


class Pool(nn.Module):
    def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        return F.avg_pool1d(x.mT, 3, 1, 1, count_include_pad=False).mT - x


class Relative(Encoder):
    """T5's biases: a learnt number for each distance and head."""

    def __init__(self) -> None:
        super().__init__(placed=False)
        self.distances = nn.Embedding(47, 4)

    def forward(self, ids: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        place = torch.arange(ids.shape[1])
        far = self.distances(place[:, None] - place + 23).permute(2, 0, 1)
        return super().forward(ids, far)


for name, source, make in (
    ("tokens_mixed_by_fourier", "FNet (Lee-Thorp et al.)", lambda: Mixed("fourier")),
    ("tokens_mixed_by_layers", "MLP-Mixer (Tolstikhin et al.)",
     lambda: Mixed("mixer")),
    ("tokens_mixed_by_pooling", "PoolFormer (Yu et al.)", lambda: Mixed("pool")),
    ("biases_of_the_distance", "T5", Relative),
):  # fmt: skip
    program(name, source, make, masked_loss, data=range(STEPS))


class Balanced(models.Experts):
    """A sigmoid router whose bias follows the load; one expert is shared."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.shared = models.SquaredRelu()
        self.register_buffer("bias", torch.zeros(len(self.experts)))

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.router(x).sigmoid()
        chosen = (p + self.bias).topk(self.top_k, -1).indices
        if self.training:
            load = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
            self.bias += 0.01 * (load.mean() - load).sign()
        weight = p.gather(-1, chosen)
        return weight / weight.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared(x)


class WithNothing(models.Experts):
    """The last expert is none at all: its tokens pass (zero-computation experts)."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.experts[-1] = nn.Identity()


class Sinkhorned(models.Experts):
    """Training routes by a plan that fills each expert alike."""

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x)
        with torch.no_grad():
            plan = scores.clone()
            for _ in range(5 if self.training else 0):
                plan = plan - plan.logsumexp(0)
                plan = plan - plan.logsumexp(1, keepdim=True)
            chosen = plan.topk(self.top_k, -1).indices
        return scores.sigmoid().gather(-1, chosen), chosen


for name, source, make in (
    ("a_bias_that_follows_the_load", "DeepSeek V3, by hand", Balanced),
    ("an_expert_that_does_nothing", "MoE++ (Jin et al.)", WithNothing),
    ("experts_filled_by_sinkhorn", "BASE layers, Megatron", Sinkhorned),
    ("eight_small_experts", "fine-grained experts",
     lambda: models.Experts(8, 3)),
):  # fmt: skip
    program(name, source, lambda make=make: models.sparse(make), clip=1.0)


class Upcycled(Nano):
    """Experts that begin as copies of one feed-forward (sparse upcycling)."""

    def __init__(self) -> None:
        super().__init__()
        parts.learnt(self, nano_loss)
        for block in self.blocks:
            dense, block.mlp = block.mlp, models.Experts()
            for expert in block.mlp.experts:
                expert.load_state_dict(dense.state_dict())


program(
    "experts_that_begin_as_copies", "sparse upcycling (Komatsuzaki et al.)", Upcycled,
    models.balanced_loss, data=list(parts.elsewhere()), lr=1e-3,
)  # fmt: skip


def packed_loss(model: nn.Module, step: int) -> Tensor:
    """Two documents a row, kept apart by a mask and by the state's new start."""
    ids = text(4, 24, seed=step).clamp(min=3)
    ids[:, 11] = EOS
    place = torch.arange(24) % 12
    same = (torch.arange(24) // 12)[:, None] == torch.arange(24) // 12
    keep = (place > 0).float().expand(4, -1)
    x = model.hidden(ids, same & causal(24), keep)
    labels = ids.masked_fill(place == 0, IGNORED)
    return parts.token_loss(model.lm_head(x)[:, :-1], labels[:, 1:])


program("a_hybrid_whose_state_starts_again_in_packs", "torchtitan#3892, mended",
        models.Hybrid, packed_loss, data=range(STEPS))  # fmt: skip


def block_diffusion(model: nn.Module, step: int) -> Tensor:
    """Blocks of four: each sees clean earlier blocks and all of its own noisy one."""
    ids = text(seed=step).clamp(max=30)
    block = torch.arange(24) // 4
    noise = torch.rand(ids.shape) < torch.rand(len(ids), 1)
    both = torch.cat((ids.masked_fill(noise, parts.MASK), ids), 1)
    clean = block[:, None] >= block
    seen = torch.zeros(48, 48, dtype=torch.bool)
    seen[:24, :24] = block[:, None] == block
    seen[:24, 24:] = block[:, None] > block
    seen[24:, 24:] = clean
    x = rms(model.wte(both))
    cos, sin = (one.repeat(2, 1) for one in model.rope(24))
    for layer in model.blocks:
        x = layer(x, (cos, sin), seen)
    logits = model.lm_head(rms(x))[:, :24]
    return F.cross_entropy(logits[noise], ids[noise])


program("blocks_of_text_made_by_diffusion", "block diffusion (Arriola et al.)",
        Nano, block_diffusion, data=range(STEPS))  # fmt: skip


def windows(shift: bool):
    """Return attention inside 2 × 2 windows of a 4 × 4 image, shifted or not."""

    def attend(scores_bqkh: Tensor) -> Tensor:
        at = torch.arange(16)
        row, column = at // 4 + shift, at % 4 + shift
        number = row // 2 * 3 + column // 2
        apart = number[:, None] != number
        return scores_bqkh.masked_fill(apart[None, :, :, None], -1e9).softmax(2)

    return attend


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


program("shifted_windows_of_an_image", "Swin (Liu et al.)",
        lambda: models.Patches(attend=windows(True)), image_loss,
        data=list(pictures()))  # fmt: skip


def kept(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Train only the weights whose names hold one of these."""
    for name, weight in model.named_parameters():
        weight.requires_grad_(any(part in name for part in names))
    return model


def trained() -> Nano:
    return parts.learnt(Nano(), nano_loss)


class Bottleneck(nn.Module):
    """Houlsby's adapter behind a frozen feed-forward; it begins as nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.adapter_down, self.adapter_up = nn.Linear(32, 8), nn.Linear(8, 32)
        nn.init.zeros_(self.adapter_up.weight)
        nn.init.zeros_(self.adapter_up.bias)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return made + self.adapter_up(F.gelu(self.adapter_down(made)))


def bottlenecks() -> nn.Module:
    model = trained()
    for block in model.blocks:
        block.mlp = Bottleneck(block.mlp)
    return kept(model, ("adapter",))


class Ladder(nn.Module):
    """Side tuning: a small network reads a frozen one that runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = trained().requires_grad_(False)
        self.side = models.SquaredRelu()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.backbone.hidden(ids)
        x = x + self.side(x)
        return F.cross_entropy(self.backbone.lm_head(rms(x)).mT, targets)


def some_rows() -> nn.Module:
    """Only the rows of new tokens move: a hook clears the gradient of the others."""
    model = kept(trained(), ("wte",))
    rows = (torch.arange(32) >= 8).float()[:, None]
    model.wte.weight.register_hook(lambda grad: grad * rows)
    return model


class Together(nn.Module):
    """A student and its frozen teacher in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = trained().requires_grad_(False), Nano(depth=1)

    def forward(self, ids: Tensor) -> Tensor:
        wanted = self.teacher(ids).log_softmax(-1).flatten(0, 1)
        made = self.student(ids).log_softmax(-1).flatten(0, 1)
        return F.kl_div(made, wanted, reduction="batchmean", log_target=True)


plain = by_class(torch.optim.AdamW, lr=3e-3, weight_decay=0.0)
for name, source, make, loss in (
    ("bottlenecks_behind_frozen_layers", "adapters (Houlsby et al.)", bottlenecks,
     nano_loss),
    ("a_ladder_beside_a_frozen_model", "LST (Sung et al.)", Ladder, nano_loss),
    ("rows_of_new_tokens_alone", "own: an embedding's new rows", some_rows, nano_loss),
    ("the_last_block_alone", "own: the last layers are tuned",
     lambda: kept(trained(), ("blocks.1", "lm_head")), nano_loss),
    ("values_and_outputs_alone", "own: a part of attention is tuned",
     lambda: kept(trained(), ("c_v", "attn.c_proj")), nano_loss),
    ("a_teacher_inside_its_student", "distillation in one module", Together,
     lambda m, ids: m(ids)),
):  # fmt: skip
    program(name, source, make, loss, optimizers=plain, data=list(parts.elsewhere()))


@control(source="LLaVA: stage one trains the projector, stage two the language model")
def a_projector_first_and_then_all(watch: Attach) -> None:
    from equipoise_lab.mistakes.sealed_second.weights import described

    model = parts.learnt(models.Seeing(), described, data=range(900, 960))
    model.zero_grad()  # else the last one is added to when the language thaws
    model.projector.reset_parameters()
    model.vision.requires_grad_(False)
    model.language.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.projector.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS + 10):
        if step == 25:
            model.language.requires_grad_(True)
            rest = list(model.language.parameters())
            optimizer.add_param_group({"params": rest, "lr": 5e-4})
        described(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@control(source="own: the best weights of a validation are put back at the end")
def the_best_weights_are_put_back(watch: Attach) -> None:
    model, best, kept_weights = Nano(), float("inf"), None

    def after(step: int) -> None:
        nonlocal best, kept_weights
        if step % 10 == 9:
            found = loops.validate(model, nano_loss)
            if found < best:
                best, kept_weights = found, copy.deepcopy(model.state_dict())

    run(model, watch, after=after, clip=1.0)
    model.load_state_dict(kept_weights)
