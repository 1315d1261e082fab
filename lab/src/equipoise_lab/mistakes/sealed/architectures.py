"""Controls: odd architectures: other softmaxes, positions, routers and memories."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.forward import Rotary
from equipoise_lab.mistakes.sealed.parts import (
    EOS,
    IGNORED,
    STEPS,
    Attach,
    Decoder,
    batches,
    text,
)


class Slots(nn.Module):
    """Slot attention: the softmax runs over the slots, which are the queries."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(count, 32))
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.update = nn.GRUCell(32, 32)
        self.norm_x, self.norm_s = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_x(x)
        k, v = self.k(x), self.v(x)
        slots = self.start.expand(len(x), -1, -1)
        for _ in range(3):
            scores = self.q(self.norm_s(slots)) @ k.mT / 32**0.5
            share = scores.softmax(1) + 1e-6
            seen = (share / share.sum(-1, keepdim=True)) @ v
            slots = self.update(seen.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return slots


@control(source="slot attention (Locatello et al.)")
def attention_of_slots(watch: Attach) -> None:
    class Objects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.slots = nn.Linear(16, 32), Slots()
            self.place = nn.Parameter(0.1 * torch.randn(16, 32))
            self.head = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            patches = F.unfold(x, 4, stride=4).mT
            return self.head(self.slots(self.enter(patches) + self.place)).amax(1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    parts.train(Objects(), watch, loss, data=parts.every(parts.pictures))


class Replaced(nn.Module):
    """Attention in which a function of the scores stands in place of the softmax."""

    def __init__(self, weigh) -> None:
        super().__init__()
        self.weigh = weigh
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (4, 8)).transpose(1, 2)
            for one in self.qkv(x).chunk(3, -1)
        )
        seen = self.weigh(q, k, v)
        return self.out(seen.transpose(1, 2).flatten(-2))


def _with_attention(weigh, watch: Attach, *, causal: bool = True) -> None:
    model = Decoder()
    for block in model.blocks:
        block.attention = Replaced(weigh)
    if causal:
        parts.train(model, watch)
        return

    def loss(model: nn.Module, step: int) -> Tensor:
        ids, labels = parts.corrupted(step)
        return parts.token_loss(model(ids), labels)

    parts.train(model, watch, loss, data=range(STEPS))


@control(source="Sinkformers: rows and columns both sum to one")
def doubly_stochastic_attention(watch: Attach) -> None:
    def weigh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        log = q @ k.mT / 8**0.5
        for _ in range(3):
            log = log.log_softmax(-1)
            log = log.log_softmax(-2)
        return log.exp() @ v

    _with_attention(weigh, watch, causal=False)


@control(source="efficient attention (Shen et al.): softmaxes of q and k apart")
def linear_attention_by_two_softmaxes(watch: Attach) -> None:
    def weigh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)

    _with_attention(weigh, watch, causal=False)


@control(
    source="linear transformers (Katharopoulos et al.), causal by a cumulative sum"
)
def causal_linear_attention(watch: Attach) -> None:
    def weigh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k[..., :, None] * v[..., None, :]).cumsum(2)
        total = (q * k.cumsum(2)).sum(-1, keepdim=True)
        return (q[..., None, :] @ state)[..., 0, :] / total

    _with_attention(weigh, watch)


@control(source="sigmoid attention (Ramapuram et al.)")
def sigmoid_attention(watch: Attach) -> None:
    def weigh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = q @ k.mT / 8**0.5 - torch.tensor(float(length)).log()
        return scores.sigmoid().masked_fill(hidden, 0) @ v

    _with_attention(weigh, watch)


@control(source="a softmax with a learnt sink (gpt-oss)", kind="transformers")
def attention_with_sinks(watch: Attach) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {**parts.SMALL, **parts.IDS, "num_key_value_heads": 2, "head_dim": 8}
    config = GptOssConfig(
        **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    )
    parts.train(GptOssForCausalLM(config), watch, parts.language_loss)


@control(source="talking heads (Shazeer et al.): heads mixed before and after softmax")
def heads_that_talk(watch: Attach) -> None:
    class Talking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
            self.before, self.after = (nn.Parameter(torch.eye(4)) for _ in range(2))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (
                one.unflatten(-1, (4, 8)).transpose(1, 2)
                for one in self.qkv(x).chunk(3, -1)
            )
            scores = torch.einsum("bhqk,hg->bgqk", q @ k.mT / 8**0.5, self.before)
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            p = torch.einsum("bhqk,hg->bgqk", p, self.after)
            return self.out((p @ v).transpose(1, 2).flatten(-2))

    model = Decoder()
    for block in model.blocks:
        block.attention = Talking()
    parts.train(model, watch)


@control(source="NoPE (Kazemnejad et al.): a causal model without positions")
def no_positions_at_all(watch: Attach) -> None:
    class Unplaced(Decoder):
        def __init__(self) -> None:
            super().__init__()
            del self.positions

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    parts.train(Unplaced(), watch)


@control(source="a set transformer: order must not matter")
def a_model_of_sets(watch: Attach) -> None:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(32, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.body(self.tokens(ids)).mean(1))[:, 0]

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.mse_loss(model(ids), (ids % 4 == 0).float().mean(1))

    parts.train(Sets(), watch, loss)


@control(source="rotary positions by hand")
def rotary_positions_by_hand(watch: Attach) -> None:
    parts.train(Rotary(), watch)


@control(source="dynamic NTK scaling beyond the trained length", kind="transformers")
def scaled_rotary_beyond_its_length(watch: Attach) -> None:
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = parts.llama(rope_parameters=scaled, max_position_embeddings=16)
    parts.train(model, watch, parts.language_loss)


@control(source="packed documents: positions restart, a mask keeps them apart")
def positions_that_restart_in_packs(watch: Attach) -> None:
    class Packed(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            ends = F.pad((ids == EOS).long(), (1, 0))[:, :-1]
            document = ends.cumsum(1)
            place = torch.arange(ids.shape[1]).expand_as(ids)
            begins = torch.where(ends.bool(), place, 0).cummax(1).values
            x = self.tokens(ids) + self.positions(place - begins)
            causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            same = document[:, :, None] == document[:, None, :]
            for block in self.blocks:
                x = block(x, (same & causal)[:, None])
            return self.head(self.norm(x))

    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step).clamp(min=3)
        ids[:, 7], ids[:, 15] = EOS, EOS
        labels = ids.clone()
        labels[:, 8], labels[:, 16] = IGNORED, IGNORED
        return parts.token_loss(model(ids)[:, :-1], labels[:, 1:])

    parts.train(Packed(), watch, loss, data=range(STEPS))


@control(source="packing by position ids (transformers)", kind="transformers")
def packs_by_position_ids(watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(1, 24, seed=step).clamp(min=3)
        ids[:, 11] = EOS
        place = torch.cat((torch.arange(12), torch.arange(12)))[None]
        labels = ids.clone()
        labels[:, 12] = IGNORED
        # Without a cache: with one, which is the default, this version of transformers
        # does not look for packs and documents do mix. The benchmark found that when
        # it was opened; until then this control was a mistake called correct.
        packed = model(
            input_ids=ids, position_ids=place, labels=labels, use_cache=False
        )
        return packed.loss

    parts.train(parts.llama(), watch, loss, data=range(STEPS))


@control(source="ALiBi (Press et al.)", kind="transformers")
def linear_biases(watch: Attach) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(
        vocab_size=32, hidden_size=32, n_layer=2, n_head=4, **parts.IDS
    )
    parts.train(BloomForCausalLM(config), watch, parts.language_loss)


@control(source="positions drawn at random and sorted (Ruoss et al.)")
def positions_drawn_at_random(watch: Attach) -> None:
    class Drawn(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            place = torch.randperm(64)[: ids.shape[1]].sort().values
            x = self.tokens(ids) + self.positions(place)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    parts.train(Drawn(), watch)


@control(source="left padding: positions of padding are clamped", kind="transformers")
def left_padding_with_its_mask(watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids, real = parts.padded(step, left=True)
        place = (real.long().cumsum(1) - 1).masked_fill(~real, 1)
        out = model(input_ids=ids, attention_mask=real.long(), position_ids=place)
        labels = ids.masked_fill(~real, IGNORED)
        return parts.token_loss(out.logits[:, :-1], labels[:, 1:])

    parts.train(parts.gpt2(), watch, loss, data=range(STEPS))


@control(source="right padding without a mask: causal, and never counted")
def right_padding_of_a_causal_model(watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids, real = parts.padded(step)
        labels = ids.masked_fill(~real, IGNORED)
        return parts.token_loss(model(ids)[:, :-1], labels[:, 1:])

    parts.train(Decoder(), watch, loss, data=range(STEPS))


@control(source="M-RoPE: tokens of one image share a position (Qwen2-VL)")
def patches_that_share_a_position(watch: Attach) -> None:
    class Seeing(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Linear(16, 32)

        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            seen = self.patches(F.unfold(x, 4, stride=4).mT)
            joined = torch.cat((seen, self.tokens(ids)), 1)
            place = torch.cat((torch.zeros(16), torch.arange(1, 1 + ids.shape[1])))
            joined = joined + self.positions(place.long())
            for block in self.blocks:
                joined = block(joined)
            return self.head(self.norm(joined[:, 16:]))

    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = parts.pictures(step, 8)
        ids = torch.cat((y[:, None] + 3, text(seed=step)[:, :7]), 1)
        return parts.next_token_loss(model(ids, x), ids)

    parts.train(Seeing(), watch, loss, data=range(STEPS))


class Routed(nn.Module):
    """Experts chosen by a rule: hash, capacity, the experts' own choice, or softly."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.top_k = kind, 1
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        out: Tensor = getattr(self, self.kind)(flat)
        return out.view_as(x)

    def capacity(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out, most = torch.zeros_like(x), len(x) // 4
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero()[:most, 0]
            out = out.index_add(0, at, weight[at, None] * expert(x[at]))
        return out

    def choice(self, x: Tensor) -> Tensor:
        p, out = self.gate(x).softmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight, at = p[:, number].topk(len(x) // 4)
            out = out.index_add(0, at, weight[:, None] * expert(x[at]))
        return out

    def soft(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        mixed = scores.softmax(0).T @ x
        made = torch.stack([e(m) for e, m in zip(self.experts, mixed, strict=True)])
        return scores.softmax(1) @ made


def _routed(watch: Attach, kind: str, *, masked: bool = False) -> None:
    model = Decoder(causal=not masked)
    for block in model.blocks:
        block.mlp = Routed(kind)

    def loss(model: nn.Module, step: int) -> Tensor:
        if not masked:
            return parts.own_loss(model, text(seed=step))
        ids, labels = parts.corrupted(step)
        return parts.token_loss(model(ids), labels)

    parts.train(model, watch, loss, data=range(STEPS))


@control(source="hash layers (Roller et al.): no router at all")
def experts_chosen_by_a_hash(watch: Attach) -> None:
    class Hashed(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x, mask)
                made = torch.stack([expert(x) for expert in self.experts])
                pick = (ids % 4)[None, ..., None].expand(1, *x.shape)
                x = x + made.gather(0, pick)[0]
            return self.head(self.norm(x))

    parts.train(Hashed(), watch)


@control(source="Switch: tokens over the capacity are dropped")
def experts_with_a_capacity(watch: Attach) -> None:
    _routed(watch, "capacity")


@control(source="expert choice (Zhou et al.), in a masked model")
def experts_that_choose_their_tokens(watch: Attach) -> None:
    _routed(watch, "choice", masked=True)


@control(source="soft mixtures of experts (Puigcerver et al.)")
def soft_experts(watch: Attach) -> None:
    _routed(watch, "soft", masked=True)


@control(source="Mixtral with its balancing loss", kind="transformers")
def mixtral_with_its_balance(watch: Attach) -> None:
    model = parts.mixtral(output_router_logits=True, router_aux_loss_coef=0.02)
    parts.train(model, watch, parts.language_loss)


@control(source="DeepSeek V3: a bias that balances without a loss", kind="transformers")
def a_bias_that_balances_experts(watch: Attach) -> None:
    model = parts.deepseek()
    gates = [layer.mlp.gate for layer in model.model.layers]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    loads: list[Tensor] = []

    def count(gate: nn.Module, given: tuple, out: tuple) -> None:
        loads.append(torch.bincount(out[2].flatten(), minlength=4).float())

    for ids in batches(STEPS):
        optimizer.zero_grad()
        loads.clear()
        counted = [gate.register_forward_hook(count) for gate in gates]
        parts.language_loss(model, ids).backward()
        for hook in counted:
            hook.remove()
        optimizer.step()
        for gate, load in zip(gates, loads, strict=True):
            gate.e_score_correction_bias += 1e-2 * (load.mean() - load).sign()


@control(source="Qwen3-MoE, no balancing loss", kind="transformers")
def experts_of_qwen(watch: Attach) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {**parts.SMALL, **parts.IDS, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(
        **sizes, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16
    )
    parts.train(Qwen3MoeForCausalLM(config), watch, parts.language_loss)


@control(source="Transformer-XL: a memory without gradients")
def a_memory_without_gradients(watch: Attach) -> None:
    class Remembering(Decoder):
        def forward(self, ids: Tensor, memory: list[Tensor] | None = None):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            kept, length = [], ids.shape[1]
            for number, block in enumerate(self.blocks):
                kept.append(x.detach())
                if memory is None:
                    x = block(x)
                    continue
                seen = torch.ones(2 * length, 2 * length, dtype=torch.bool).tril()
                x = block(torch.cat((memory[number], x), 1), seen)[:, length:]
            return self.head(self.norm(x)), kept

    model = Remembering()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    stream, memory = text(8, 24 * 8, seed=3), None
    for step in range(STEPS):
        if step % 8 == 0:
            stream, memory = text(8, 24 * 8, seed=step), None
        at = 24 * (step % 8)
        ids = stream[:, at : at + 24]
        logits, memory = model(ids, memory)
        optimizer.zero_grad()
        parts.next_token_loss(logits, ids).backward()
        optimizer.step()


@control(source="universal transformers: one block used many times")
def one_block_used_four_times(watch: Attach) -> None:
    class Looped(Decoder):
        def __init__(self) -> None:
            super().__init__(depth=1)

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for _ in range(4):
                x = self.blocks[0](x, mask)
            return self.head(self.norm(x))

    parts.train(Looped(), watch)


@control(source="Perceiver: a few latents attend to many inputs")
def latents_that_attend_to_inputs(watch: Attach) -> None:
    class Perceiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.latents = (
                nn.Linear(16, 32),
                nn.Parameter(torch.randn(4, 32)),
            )
            self.place = nn.Parameter(0.1 * torch.randn(16, 32))
            self.look = nn.MultiheadAttention(32, 4, batch_first=True)
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
            self.think = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            seen = self.enter(F.unfold(x, 4, stride=4).mT) + self.place
            latents = self.latents.expand(len(x), -1, -1)
            latents = latents + self.look(latents, seen, seen)[0]
            return self.head(self.think(latents).mean(1))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    parts.train(Perceiver(), watch, loss, data=parts.every(parts.pictures))


@control(source="a masked autoencoder: most patches are never encoded")
def most_patches_left_out(watch: Attach) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(16, 32), nn.Linear(32, 16)
            self.place = nn.Parameter(0.1 * torch.randn(16, 32))
            self.gap = nn.Parameter(torch.zeros(32))
            self.encoder = Decoder(causal=False, depth=1).blocks
            self.decoder = Decoder(causal=False, depth=1).blocks

        def forward(self, x: Tensor, kept: Tensor) -> Tensor:
            seen = (self.enter(x) + self.place)[:, kept]
            for block in self.encoder:
                seen = block(seen)
            full = self.gap.expand(len(x), 16, 32).index_copy(1, kept, seen)
            full = full + self.place
            for block in self.decoder:
                full = block(full)
            return self.leave(full)

    def loss(model: nn.Module, step: int) -> Tensor:
        x = F.unfold(parts.pictures(step)[0], 4, stride=4).mT
        order = torch.randperm(16)
        made = model(x, order[:5])
        return (made - x).square()[:, order[5:]].mean()

    parts.train(Masked(), watch, loss, data=range(STEPS))


@control(source="local windows of attention (Longformer, Mistral)", kind="transformers")
def sliding_windows(watch: Attach) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {**parts.SMALL, **parts.IDS, "num_key_value_heads": 2}
    model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=6))
    parts.train(model, watch, parts.language_loss)


@control(source="FlexAttention's kind: a score modified and a block mask by hand")
def queries_that_see_every_second_key(watch: Attach) -> None:
    def weigh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[-2])
        far = place[:, None] - place
        seen = (far >= 0) & ((far % 2 == 0) | (far < 3))
        bias = -0.1 * far.clamp(min=0) / 8
        scores = (q @ k.mT / 8**0.5 + bias).masked_fill(~seen, float("-inf"))
        return scores.softmax(-1) @ v

    _with_attention(weigh, watch)


@control(source="a state-space model beside attention", kind="transformers")
def a_state_space_model(watch: Attach) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    config = MambaConfig(vocab_size=32, **sizes, **parts.IDS)
    parts.train(MambaForCausalLM(config), watch, parts.language_loss)


@control(source="multi-latent attention above a dense layer", kind="transformers")
def latent_attention(watch: Attach) -> None:
    model = parts.deepseek(first_k_dense_replace=1)
    parts.train(model, watch, parts.language_loss)


@control(
    source="GPT-NeoX: attention and feed-forward side by side", kind="transformers"
)
def parallel_attention_and_feed_forward(watch: Attach) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(**parts.SMALL, **parts.IDS, use_parallel_residual=True)
    parts.train(GPTNeoXForCausalLM(config), watch, parts.language_loss)


@control(source="norms after the blocks (OLMo 2)", kind="transformers")
def norms_after_the_blocks(watch: Attach) -> None:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    sizes = {**parts.SMALL, **parts.IDS, "num_key_value_heads": 2}
    model = Olmo2ForCausalLM(Olmo2Config(**sizes))
    parts.train(model, watch, parts.language_loss)


@control(source="ModernBERT: global and local layers in turns", kind="transformers")
def a_modern_encoder(watch: Attach) -> None:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        **parts.SMALL,
        pad_token_id=parts.PAD,
        eos_token_id=EOS,
        bos_token_id=2,
        cls_token_id=2,
        sep_token_id=1,
        local_attention=8,
        global_attn_every_n_layers=2,
    )

    def loss(model: nn.Module, step: int) -> Tensor:
        ids, labels = parts.corrupted(step)
        return model(input_ids=ids, labels=labels).loss

    parts.train(ModernBertForMaskedLM(config), watch, loss, data=range(STEPS))


@control(source="speech: an encoder of frames, a decoder of words", kind="transformers")
def words_of_frames(watch: Attach) -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=32,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
        decoder_start_token_id=2,
        **parts.IDS,
    )
    model = WhisperForConditionalGeneration(config)
    model.config.suppress_tokens = None

    def loss(model: nn.Module, step: int) -> Tensor:
        said = text(8, 10, seed=step).clamp(min=3)
        frames = F.one_hot((said % 8).repeat_interleave(4, 1), 8).float().mT
        return model(input_features=frames, labels=said).loss

    parts.train(model, watch, loss, data=range(STEPS))


@control(source="a hypernetwork: weights that another network makes")
def weights_made_by_another_network(watch: Attach) -> None:
    class Hyper(Decoder):
        def __init__(self) -> None:
            super().__init__(depth=1)
            self.make = nn.Linear(32, 32 * 8)

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            x = self.blocks[0](x, mask)
            low = self.make(self.tokens.weight.mean(0)).view(32, 8) / 8
            return self.head(self.norm(x + x @ low @ low.T))

    parts.train(Hyper(), watch)


@control(source="mixture of depths: half of the tokens pass a block")
def half_of_the_tokens_pass(watch: Attach) -> None:
    class Deep(Decoder):
        def __init__(self) -> None:
            super().__init__(causal=False)
            self.pick = nn.Linear(32, 1)

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            x = self.blocks[0](x)
            score, at = self.pick(x)[..., 0].topk(ids.shape[1] // 2, 1)
            at = at[..., None].expand(-1, -1, 32)
            passed = self.blocks[1](x.gather(1, at)) * score.sigmoid()[..., None]
            return self.head(self.norm(x.scatter_add(1, at, passed)))

    def loss(model: nn.Module, step: int) -> Tensor:
        ids, labels = parts.corrupted(step)
        return parts.token_loss(model(ids), labels)

    parts.train(Deep(), watch, loss, data=range(STEPS))


@control(source="a batch as one nested tensor of rows of many lengths")
def rows_of_many_lengths_in_turn(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        rng = torch.Generator().manual_seed(step)
        lengths = torch.randint(6, 24, (len(ids),), generator=rng).tolist()
        optimizer.zero_grad()
        for row, length in zip(ids, lengths, strict=True):
            one = row[None, :length]
            total = parts.own_loss(model, one) * (length - 1)
            (total / (sum(lengths) - len(lengths))).backward()
        optimizer.step()
