"""Mistakes in the forward pass: what a position sees, and in which precision."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from equipoise_lab.mistakes.case import mistake
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import IGNORED, PAD, STEPS, Attach, text
from equipoise_lab.mistakes.sealed.trainers import Texts, fit
from equipoise_lab.mistakes.sealed_second import loops, models
from equipoise_lab.mistakes.sealed_second.loops import run
from equipoise_lab.mistakes.sealed_second.models import (
    Encoder,
    Hybrid,
    Nano,
    NanoAttention,
    causal,
    nano_loss,
    rms,
)

HIDDEN = -1e4


def masked_loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a masked model at the tokens that were hidden."""
    ids, labels = parts.corrupted(step)
    return parts.token_loss(model(ids), labels)


def padded_loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a causal model over rows that end in padding."""
    ids, real = parts.padded(step)
    labels = ids.masked_fill(~real, IGNORED)
    return parts.token_loss(model(ids)[:, :-1], labels[:, 1:])


def pictures():
    """Yield images and what they show, enough of them to learn it."""
    return parts.every(lambda step: parts.pictures(step, 32), 120)


def with_attention(make) -> Nano:
    """Return a decoder with another attention in each block."""
    model = Nano()
    for block in model.blocks:
        block.attn = make()
    return model


@mistake(
    "check.sees_target",
    "check.influence_future",
    source="own: a window of |q − k| < w, and the causal half forgotten",
)
def a_window_that_opens_both_ways(wrong: bool, watch: Attach) -> None:
    class Windowed(NanoAttention):
        def attend(self, q, k, v, mask):
            place = torch.arange(q.shape[-2])
            near = (place[:, None] - place).abs() < 6
            seen = near if wrong else near & causal(len(place))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    run(with_attention(Windowed), watch, schedule=loops.warm_cosine)


@mistake(
    "check.sees_target",
    "check.influence_future",
    source="transformers#48748: a mask is given, so the kernel's causal flag is off",
)
def a_padding_mask_in_place_of_the_causal_one(wrong: bool, watch: Attach) -> None:
    class Padded(Nano):
        def forward(self, ids: Tensor, targets: Tensor | None = None, mask=None):
            mask = (ids != PAD)[:, None, None, :]
            if not wrong:
                mask = mask & causal(ids.shape[1])
            return super().forward(ids, targets, mask)

    run(Padded(), watch, padded_loss, data=range(STEPS), clip=1.0)


@mistake(
    "check.mask_sign",
    "check.sees_target",
    source="rasbt/LLMs-from-scratch#1062: True means seen to SDPA; latent attention",
)
def a_boolean_mask_of_what_is_hidden(wrong: bool, watch: Attach) -> None:
    class Inverted(models.Latent):
        def attend(self, q, k, v, mask):
            hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
            hidden[-1] = False  # the last row keeps a key either way
            seen = hidden | torch.eye(len(hidden), dtype=torch.bool)
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen if wrong else ~hidden
            )

    run(with_attention(Inverted), watch)


@mistake(
    "check.mask_sign",
    "check.padding_attended",
    source="own: an additive mask of mask × −10⁴ instead of (1 − mask) × −10⁴",
)
def an_additive_mask_of_the_real_tokens(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids, real = parts.padded(step)
        hidden = (torch.rand(ids.shape) < 0.25) & real
        given = real if wrong else ~real
        bias = HIDDEN * given.float()[:, None, None, :]
        logits = model(ids.masked_fill(hidden, parts.MASK), bias)
        return F.cross_entropy(logits[hidden], ids[hidden])

    run(Encoder(), watch, loss, data=range(STEPS), average=True)


@mistake(
    "check.padding_attended",
    "check.influence_padding",
    source="own: an encoder is masked, and the cross-attention to it is not",
    kind="transformers",
)
def cross_attention_to_the_padding_of_its_source(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids, real = parts.padded(step)
        mask = real.long()
        seen = model.encoder(input_ids=ids, attention_mask=mask)
        labels = ids.masked_fill(~real, IGNORED)
        given = {} if wrong else {"attention_mask": mask}
        return model(encoder_outputs=seen, labels=labels, **given).loss

    model = parts.t5()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=2e-2)
    run(model, watch, loss, data=range(STEPS), optimizers=[optimizer])


@mistake(
    "check.softmax_axis",
    source="own: scores in the layout (b, q, k, h), and a softmax over the queries",
)
def a_softmax_over_the_queries_of_an_einsum(wrong: bool, watch: Attach) -> None:
    def attend(scores_bqkh: Tensor) -> Tensor:
        return scores_bqkh.softmax(1 if wrong else 2)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    model = models.Patches(attend=attend)
    run(model, watch, loss, data=pictures(), average=True)


class Sines(nn.Module):
    """The encoding of PyTorch's tutorial, whose input is sequence-first."""

    def __init__(self, *, by_batch: bool) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(64.0), 100 ** (-torch.arange(16) / 16))
        self.register_buffer("pe", torch.cat((angle.sin(), angle.cos()), -1))
        self.by_batch = by_batch

    def forward(self, x: Tensor) -> Tensor:
        if self.by_batch:
            return x + self.pe[: x.shape[0], None]
        return x + self.pe[: x.shape[1]]


@mistake(
    "check.positions",
    "check.no_positions",
    source="pytorch/tutorials, own: a sequence-first encoding of batch-first input",
)
def an_encoding_of_the_row_instead_of_the_place(wrong: bool, watch: Attach) -> None:
    class Placed(Encoder):
        def __init__(self) -> None:
            super().__init__(placed=False)
            self.sines = Sines(by_batch=wrong)

        def embedded(self, ids: Tensor) -> Tensor:
            return self.sines(self.tokens(ids))

    run(Placed(), watch, masked_loss, data=range(STEPS))


@mistake(
    "check.no_positions",
    "check.positions",
    source="own: a bias of the query's place alone, which the softmax takes out",
)
def a_linear_bias_of_the_query_alone(wrong: bool, watch: Attach) -> None:
    class Sloped(Encoder):
        def __init__(self) -> None:
            super().__init__(placed=False)

        def forward(self, ids: Tensor, bias: Tensor | float = 0.0) -> Tensor:
            place = torch.arange(ids.shape[1]).float()
            keys = 0 * place if wrong else place
            far = (place[:, None] - keys).abs()
            slopes = 2.0 ** -torch.arange(1, 5)
            return super().forward(ids, -slopes[:, None, None] * far)

    run(Sloped(), watch, masked_loss, data=range(STEPS), clip=1.0)


@mistake(
    "check.eval_mode",
    source="own: generation during training calls eval(), and nothing calls train()",
    kind="transformers",
)
def evaluation_mode_after_the_first_rollout(wrong: bool, watch: Attach) -> None:
    model = parts.gpt2(dropout=0.1)

    def after(step: int) -> None:
        if step % 8 == 0:
            model.eval()
            given = text(2, 4, seed=step)
            model.generate(given, max_new_tokens=4, do_sample=False)
            if not wrong:
                model.train()

    run(model, watch, parts.language_loss, after=after)


@mistake(
    "check.dropout_in_eval",
    source="own: validation under no_grad in training mode, with batch statistics",
)
def validated_with_the_batchs_own_statistics(wrong: bool, watch: Attach) -> None:
    class Normed(models.Patches):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(self.stem, nn.BatchNorm2d(32), nn.Dropout(0.1))

    model = Normed()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def after(step: int) -> None:
        if step % 5 == 4:
            if not wrong:
                model.eval()
            with torch.no_grad():
                loss(model, parts.pictures(7000))
            model.train()

    run(model, watch, loss, data=pictures(), after=after)


@mistake(
    "check.rotary_precision",
    source="candle#3520: positions and frequencies cast to bf16 before the product",
)
def positions_cast_before_the_angles(wrong: bool, watch: Attach) -> None:
    class Cast(Nano):
        def rope(self, length: int):
            place, rates = torch.arange(length).float(), self.rates()
            if wrong:
                place, rates = place.bfloat16(), rates.bfloat16()
            angle = torch.outer(place, rates)
            return angle.cos().float(), angle.sin().float()

    run(Cast(), watch, data=parts.batches(STEPS, 4, 48))


@mistake(
    "check.rotary_precision",
    source="transformers#29285: autocast takes the product of places and frequencies",
)
def angles_of_a_product_under_autocast(wrong: bool, watch: Attach) -> None:
    class Product(Nano):
        def rope(self, length: int):
            place = torch.arange(length).float()[:, None]
            with torch.autocast("cpu", enabled=wrong, dtype=torch.bfloat16):
                angle = place @ self.rates()[None]
            return angle.cos().float(), angle.sin().float()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        return parts.next_token_loss(logits.float(), ids)

    run(Product(), watch, loss, clip=1.0)


@mistake(
    "check.rotary_precision",
    source="tinygrad#17698, own: frequencies made while bf16 is the default format",
)
def frequencies_made_in_the_default_format(wrong: bool, watch: Attach) -> None:
    class Buffered(Nano):
        def __init__(self) -> None:
            super().__init__()
            kind = torch.bfloat16 if wrong else torch.float32
            # As torch.set_default_dtype() around the constructor would have it.
            exponent = torch.arange(self.pairs, dtype=kind) / self.pairs
            self.register_buffer("inv_freq", 10000**-exponent, persistent=False)

        def rates(self) -> Tensor:
            return self.inv_freq.float()

    model = Buffered()
    run(model, watch, optimizers=[loops.Lion(model.parameters(), lr=1e-3)])


@mistake(
    "check.autocast_inactive",
    source="own: a decorator that switches autocast off, left from a hunt for NaN",
    kind="lightning",
)
def a_forward_pass_decorated_without_autocast(wrong: bool, watch: Attach) -> None:
    class Guarded(Nano):
        if wrong:
            forward = torch.autocast("cpu", enabled=False)(Nano.forward)

    module = loops.lightning_module(Guarded(), loops.rows_loss)
    data = DataLoader(Texts(), batch_size=8)
    fit(module, watch, data, precision="bf16-mixed", gradient_clip_val=1.0)


@mistake(
    "check.masked_row",
    "check.sees_target",
    source="own: a strict comparison in a mask of packs; each first token sees nothing",
)
def first_tokens_of_packs_that_see_nothing(wrong: bool, watch: Attach) -> None:
    document = torch.arange(24) // 8

    class Packed(NanoAttention):
        def attend(self, q, k, v, mask):
            place = torch.arange(24)
            before = (place[:, None] > place if wrong else place[:, None] >= place) & (
                document[:, None] == document
            )
            bias = torch.zeros(24, 24).masked_fill(~before, torch.finfo().min)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        labels = ids.clone()
        labels[:, ::8] = IGNORED
        return parts.token_loss(model(ids)[:, :-1], labels[:, 1:])

    run(with_attention(Packed), watch, loss)


@mistake(
    "check.influence_future",
    source="own: a token shift by roll(), which brings the last token to the first",
)
def a_token_shift_that_wraps_round(wrong: bool, watch: Attach) -> None:
    class Shifted(Nano):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.full((32,), 0.3))

        def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = rms(self.wte(ids))
            last = x.roll(1, 1) if wrong else F.pad(x, (0, 0, 1, 0))[:, :-1]
            x, rope = x + self.mix * last, self.rope(ids.shape[1])
            for block in self.blocks:
                x = block(x, rope, mask)
            return rms(x)

    model = Shifted()
    run(model, watch, optimizers=loops.muon_and_adamw(model))


@mistake(
    "check.influence_future",
    source="own: a channel gate from the mean of the whole row (squeeze and excite)",
)
def a_gate_of_the_mean_of_the_row(wrong: bool, watch: Attach) -> None:
    class Squeezed(Nano):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 32)

        def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = super().hidden(ids, mask)
            if wrong:
                mean = x.mean(1, keepdim=True)
            else:
                count = torch.arange(1, ids.shape[1] + 1)[:, None]
                mean = x.cumsum(1) / count
            return x * self.gate(mean).sigmoid()

    run(Squeezed(), watch, schedule=loops.warm_cosine)


@mistake(
    "check.influence_future",
    source="own: chunks of linear attention read a state that holds their own chunk",
)
def a_state_that_is_read_after_its_update(wrong: bool, watch: Attach) -> None:
    class Chunked(NanoAttention):
        def attend(self, q, k, v, mask):
            q, k, out = q.softmax(-1), k.exp(), []
            state = torch.zeros(8, 8)
            for a, b, c in zip(*(x.split(4, -2) for x in (q, k, v)), strict=True):
                after = state + b.mT @ c
                inside = (a @ b.mT).tril()
                out.append(a @ (after if wrong else state) + inside @ c)
                state = after
            place = torch.arange(1, q.shape[-2] + 1)[:, None]
            return torch.cat(out, -2) / place

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return parts.next_token_loss(model(ids), ids)

    run(with_attention(Chunked), watch, loss, clip=1.0)


@mistake(
    "check.influence_future",
    source="own: F.normalize without dim=-1 takes axis 1, which is the tokens",
)
def a_normalisation_over_axis_one(wrong: bool, watch: Attach) -> None:
    class Spherical(Nano):
        def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = super().hidden(ids, mask)
            return 5 * (F.normalize(x) if wrong else F.normalize(x, dim=-1))

    run(Spherical(), watch, average=True, evaluate=nano_loss)


@mistake(
    "check.influence_future",
    "check.influence_examples",
    source="stackoverflow: view(B, H, T, D) where a transpose is meant",
)
def heads_made_by_view_without_a_transpose(wrong: bool, watch: Attach) -> None:
    class Viewed(NanoAttention):
        def forward(self, x, rope, mask=None):
            rows, length, _ = x.shape

            def heads(y: Tensor) -> Tensor:
                if wrong:
                    return y.view(rows, self.heads, length, -1)
                return y.view(rows, length, self.heads, -1).transpose(1, 2)

            q, k, v = (heads(one(x)) for one in (self.c_q, self.c_k, self.c_v))
            q, k = (rms(models.turned(y, *rope)) for y in (q, k))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(out.transpose(1, 2).flatten(-2))

    run(with_attention(Viewed), watch)


@mistake(
    "check.influence_documents",
    source="slime#1686, torchtitan#3892: a linear state that packs share",
)
def a_linear_state_carried_into_the_next_document(wrong: bool, watch: Attach) -> None:
    class Packed(Hybrid):
        def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
            document = (position_ids == 0).cumsum(1)
            same = document[:, :, None] == document[:, None, :]
            keep = None if wrong else (position_ids > 0).float()
            mask = (same & causal(ids.shape[1]))[:, None]
            return self.lm_head(self.hidden(ids, mask, keep))

    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(4, 24, seed=step)
        place = (torch.arange(24) % 12).expand_as(ids)
        labels = ids.masked_fill(place == 0, IGNORED)
        logits = model(ids, position_ids=place)
        return parts.token_loss(logits[:, :-1], labels[:, 1:])

    run(Packed(), watch, loss, data=range(STEPS))


@mistake(
    "check.influence_documents",
    source="transformers#46588: a short convolution slides over the border of packs",
)
def a_short_convolution_over_the_border_of_packs(wrong: bool, watch: Attach) -> None:
    class Convolved(Nano):
        def __init__(self) -> None:
            super().__init__()
            self.taps = nn.Parameter(torch.randn(3, 32) / 3)

        def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
            x, length = rms(self.wte(ids)), ids.shape[1]
            mixed = x
            for back, tap in enumerate(self.taps, 1):
                inside = (position_ids >= back)[..., None] | wrong
                mixed = mixed + tap * F.pad(x, (0, 0, back, 0))[:, :length] * inside
            document = (position_ids == 0).cumsum(1)
            mask = (document[:, :, None] == document[:, None, :]) & causal(length)
            for block in self.blocks:
                mixed = block(mixed, self.rope(length), mask[:, None])
            return self.lm_head(rms(mixed))

    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(8, 24, seed=step)
        place = (torch.arange(24) % 8).expand_as(ids)
        labels = ids.masked_fill(place == 0, IGNORED)
        logits = model(ids, position_ids=place)
        return parts.token_loss(logits[:, :-1], labels[:, 1:])

    run(Convolved(), watch, loss, data=range(STEPS), clip=1.0)


@mistake(
    "check.influence_padding",
    source="own: left padding is masked in attention and read by the linear state",
)
def left_padding_that_enters_a_linear_state(wrong: bool, watch: Attach) -> None:
    class Padded(Hybrid):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            length = ids.shape[1]
            eye = torch.eye(length, dtype=torch.bool)
            seen = (attention_mask.bool()[:, None] & causal(length)) | eye
            # The state starts again at each place up to the first real token.
            first = attention_mask.cumsum(1) == 1
            keep = None if wrong else (attention_mask.bool() & ~first).float()
            return self.lm_head(self.hidden(ids, seen[:, None], keep))

    def loss(model: nn.Module, step: int) -> Tensor:
        ids, real = parts.padded(step, left=True)
        labels = ids.masked_fill(~real, IGNORED)
        logits = model(ids, attention_mask=real.long())
        return parts.token_loss(logits[:, :-1], labels[:, 1:])

    run(Padded(), watch, loss, data=range(STEPS))


@mistake(
    "check.not_repeatable",
    source="own: layers dropped at random, in evaluation too",
)
def layers_dropped_in_evaluation_too(wrong: bool, watch: Attach) -> None:
    class Dropped(Nano):
        def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x, rope = rms(self.wte(ids)), self.rope(ids.shape[1])
            for block in self.blocks:
                if (self.training or wrong) and torch.rand(()) < 0.2:
                    continue
                x = block(x, rope, mask)
            return rms(x)

    run(Dropped(depth=4), watch, evaluate=nano_loss)


@mistake(
    "check.eager_differs",
    source="own: the fused path has the default scale, the written one that of μP",
    kind="compiled",
)
def a_compiled_path_with_another_scale(wrong: bool, watch: Attach) -> None:
    class Scaled(NanoAttention):
        def attend(self, q, k, v, mask):
            scale = 1 / q.shape[-1]
            if torch.compiler.is_compiling():
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=None if wrong else scale
                )
            scores = (q @ k.mT * scale).masked_fill(~causal(q.shape[-2]), HIDDEN)
            return scores.softmax(-1) @ v

    model = with_attention(Scaled)
    run(torch.compile(model, backend="aot_eager"), watch, lr=3e-3)


@mistake(
    "check.not_repeatable",
    source="own: noise on the embeddings (NEFTune) that ignores the mode",
    kind="transformers",
)
def noise_on_embeddings_in_evaluation_too(wrong: bool, watch: Attach) -> None:
    model = models.qwen3()

    def noisy(module: nn.Module, given, made: Tensor) -> Tensor:
        if not (model.training or wrong):
            return made
        return made + torch.empty_like(made).uniform_(-1, 1) * 0.1

    model.get_input_embeddings().register_forward_hook(noisy)
    run(model, watch, parts.language_loss, evaluate=parts.language_loss)
