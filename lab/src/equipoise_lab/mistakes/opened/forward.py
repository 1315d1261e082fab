"""Mistakes in the forward pass: masks, axes, positions, modes and precision."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import STEPS, Attach, control, mistake
from equipoise_lab.mistakes.material import (
    IGNORED,
    Decoder,
    batches,
    next_token_loss,
    text,
)


def _train(model: nn.Module, watch: Attach, *, lr: float = 3e-3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.sees_target", source="own: a causal flag forgotten")
def a_decoder_without_a_causal_mask(wrong: bool, watch: Attach) -> None:
    _train(Decoder(causal=not wrong), watch)


@mistake("check.sees_target", source="own: a mask one diagonal too far")
def a_mask_that_shows_the_next_token(wrong: bool, watch: Attach) -> None:
    class Masked(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
            return super().forward(ids, seen.tril(1 if wrong else 0))

    _train(Masked(), watch)


@mistake(
    "check.mask_sign", "check.sees_target", source="pytorch: True means hidden or seen"
)
def a_mask_upside_down(wrong: bool, watch: Attach) -> None:
    class Masked(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            size = ids.shape[1]
            seen = torch.ones(size, size, dtype=torch.bool).tril()
            flipped = ~seen | torch.eye(size, dtype=torch.bool)
            return super().forward(ids, flipped if wrong else seen)

    _train(Masked(), watch)


class Written(nn.Module):
    """Attention written out by hand, with its softmax over a given axis."""

    def __init__(self, width: int, heads: int, axis: int) -> None:
        super().__init__()
        self.num_heads, self.axis = heads, axis
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -1e9).softmax(self.axis)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(-2))


@mistake("check.softmax_axis", source="PyTorch forum: softmax over the wrong axis")
def a_softmax_over_the_queries(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    for block in model.blocks:
        block.attention = Written(32, 4, axis=-2 if wrong else -1)
    _train(model, watch)


def _padded(seed: int) -> tuple[Tensor, Tensor]:
    """Return ids with padding at the end, and where tokens are real."""
    ids = text(seed=seed).clamp(min=1)
    ends = torch.randint(
        10, 24, (len(ids),), generator=torch.Generator().manual_seed(seed)
    )
    real = torch.arange(ids.shape[1]) < ends[:, None]
    return ids.masked_fill(~real, 0), real


@mistake(
    "check.padding_attended", source="own: a masked model without its padding mask"
)
def padding_is_attended(wrong: bool, watch: Attach) -> None:
    model = Decoder(causal=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids, real = _padded(step)
        rng = torch.Generator().manual_seed(step)
        hidden = (torch.rand(ids.shape, generator=rng) < 0.3) & real
        mask = None if wrong else real[:, None, None, :]
        optimizer.zero_grad()
        logits = model(ids.masked_fill(hidden, 31), mask)
        F.cross_entropy(logits[hidden], ids[hidden]).backward()
        optimizer.step()


@mistake(
    "check.padding_attended", "check.targets_ignored", source="own: padding trained"
)
def padding_is_attended_and_trained(wrong: bool, watch: Attach) -> None:
    model = Decoder(causal=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids, real = _padded(step)
        rng = torch.Generator().manual_seed(step)
        hidden = torch.rand(ids.shape, generator=rng) < 0.3
        mask = None if wrong else real[:, None, None, :]
        labels = ids.masked_fill(~hidden, IGNORED)
        if not wrong:
            labels = labels.masked_fill(~real, IGNORED)
        optimizer.zero_grad()
        logits = model(ids.masked_fill(hidden, 31), mask)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


@mistake("check.positions", source="own: positions of one token only")
def every_token_at_the_same_place(wrong: bool, watch: Attach) -> None:
    class Placed(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            place = torch.arange(ids.shape[1])
            x = self.tokens(ids) + self.positions(place * 0 if wrong else place)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    _train(Placed(), watch)


@mistake("check.eval_mode", source="own: model.eval() before training")
def trained_in_evaluation_mode(wrong: bool, watch: Attach) -> None:
    model = Decoder(dropout=0.1)
    model.train(not wrong)
    _train(model, watch)


@mistake("check.dropout_in_eval", source="transformers#33844 (TrainCheck)")
def evaluated_in_training_mode(wrong: bool, watch: Attach) -> None:
    model = Decoder(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()
        if step % 5 == 4:
            model.train(wrong)
            with torch.no_grad():
                for held in batches(2, seed=77):
                    next_token_loss(model(held), held)
            model.train()


class Rotary(nn.Module):
    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.dtype = heads, dtype
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def _turned(self, x: Tensor) -> Tensor:
        pairs = x.shape[-1] // 2
        rates = 10000 ** (-torch.arange(pairs, dtype=self.dtype) / pairs)
        place = torch.arange(x.shape[-2], dtype=self.dtype)
        angle = torch.outer(place, rates)
        cos, sin = angle.cos().float(), angle.sin().float()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(
            self._turned(q), self._turned(k), v, is_causal=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))


@mistake("check.rotary_precision", source="transformers#29285")
def rotary_angles_in_bf16(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    for block in model.blocks:
        block.attention = Rotary(32, 4, torch.bfloat16 if wrong else torch.float32)
    _train(model, watch)


@mistake("check.autocast_inactive", source="thunder#725 (TrainCheck)")
def autocast_that_is_switched_off_inside(wrong: bool, watch: Attach) -> None:
    class Guarded(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            with torch.autocast("cpu", enabled=not wrong, dtype=torch.bfloat16):
                return super().forward(ids, mask)

    model = Guarded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        next_token_loss(logits.float(), ids).backward()
        optimizer.step()


@mistake("check.masked_row", source="pytorch#41508")
def rows_that_see_nothing(wrong: bool, watch: Attach) -> None:
    """Left padding beside a causal mask: the first rows see no key at all."""

    class Hidden(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            real = ids != 0
            seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            both = seen & real[:, None, None, :]
            if not wrong:
                both = both | torch.eye(ids.shape[1], dtype=torch.bool)
            biased = torch.zeros(both.shape).masked_fill(~both, -1e4)
            return super().forward(ids, biased.masked_fill(~both, torch.finfo().min))

    model = Hidden()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids, real = _padded(step)
        ids, real = ids.flip(1), real.flip(1)
        optimizer.zero_grad()
        # The mistake: targets of padding count, and their rows see nothing.
        labels = ids if wrong else ids.masked_fill(~real, IGNORED)
        logits = model(ids)
        F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        ).backward()
        optimizer.step()


@control(source="prefix language models (T5, PrefixLM)")
def a_prefix_that_sees_itself(watch: Attach) -> None:
    class Prefixed(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            seen[:, :8] = True
            return super().forward(ids, seen)

    model = Prefixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        logits = model(ids)
        F.cross_entropy(logits[:, 7:-1].flatten(0, 1), ids[:, 8:].flatten()).backward()
        optimizer.step()


@control(source="BERT")
def a_masked_model(watch: Attach) -> None:
    model = Decoder(causal=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        rng = torch.Generator().manual_seed(step)
        hidden = torch.rand(ids.shape, generator=rng) < 0.3
        optimizer.zero_grad()
        logits = model(ids.masked_fill(hidden, 31))
        F.cross_entropy(logits[hidden], ids[hidden]).backward()
        optimizer.step()
