"""The Hessian as a sum over operations, against the whole of it by double backward."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from equipoise.auditing.curvature.attribution import (
    Attribution,
    CurvatureShare,
    attributed,
    combined,
    node_hessians,
    trace_attributed,
)
from equipoise.errors import InputError
from tests.models import GPT, GPTConfig, ViT, ViTConfig

TINY = {"width": 4, "heads": 2, "head_width": 1, "ffn_width": 3}
TINY |= {"context": 3, "vocabulary": 3}
# What the lab's blocks are made of, and the harder kinds of each part.
BLOCKS: dict[str, dict[str, Any]] = {
    "pre": {"residual": "pre"},
    "post": {"residual": "post"},
    "llama": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "kv_heads": 1,
        "head_width": 2,
    },
    "sandwich, capped": {"residual": "sandwich", "softcap": 5.0, "qk_norm": True},
    "relu": {"residual": "deepnorm", "activation": "relu"},
}


def gpt(seed: int = 0, *, depth: int = 2, **options: Any) -> tuple[GPT, Any]:
    """Return a float64 model with random norms as well, and (tokens, targets)."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**TINY, "depth": depth, **options})).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.4)
    tokens = torch.randint(0, 3, (1, 3))
    return model, (tokens, torch.randint(0, 3, (1, 3)))


def value(model: nn.Module, batch: Any, at: Mapping[str, Tensor]) -> Tensor:
    logits = functional_call(model, dict(at), (batch[0],))
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].flatten())


def double_backward(model: nn.Module, batch: Any, v: Mapping[str, Tensor]) -> float:
    """Return vᵀHv without forward-mode derivatives, nodes or rules."""
    at = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        slopes = torch.autograd.grad(
            value(model, batch, at), list(at.values()), create_graph=True
        )
        along = sum((s * v[n]).sum() for s, n in zip(slopes, at, strict=True))
        bent = torch.autograd.grad(along, list(at.values()), materialize_grads=True)
    return float(sum((b * v[n]).sum() for b, n in zip(bent, at, strict=True)))


def direction(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(p.shape, generator=rng, dtype=p.dtype)
        for n, p in model.named_parameters()
    }


@cache
def one_layer() -> tuple[GPT, Any, dict[tuple[str, str], Tensor]]:
    model, batch = gpt(depth=1)
    return model, batch, node_hessians(model, batch)


@pytest.mark.parametrize("residual", ["pre", "post"])
def test_matrices_of_all_nodes_sum_to_the_hessian(residual: str) -> None:
    model, batch = gpt(residual=residual)
    found = node_hessians(model, batch)
    names = [n for n, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    flat.requires_grad_()

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([s.numel() for s in shapes])
        at = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        return value(model, batch, at)

    with sdpa_kernel(SDPBackend.MATH):
        slope = torch.autograd.grad(loss(flat), flat, create_graph=True)[0]
        eye = torch.eye(len(flat), dtype=flat.dtype)
        truth = torch.autograd.grad(slope, flat, eye, is_grads_batched=True)[0]
    total = torch.stack(list(found.values())).sum(0)
    assert float((total - truth).abs().max() / truth.abs().max()) < 1e-10
    assert {kind for _, kind in found} == {
        *("norm", "projection", "scores", "softmax", "mix", "activation", "loss")
    }
    # Matrices of single operations are symmetric too: each is a Hessian of its own.
    assert max(float((m - m.mT).abs().max()) for m in found.values()) < 1e-12


@pytest.mark.parametrize("name", BLOCKS)
def test_twelve_layers_sum_to_the_product(name: str) -> None:
    model, batch = gpt(depth=12, **BLOCKS[name])
    v = direction(model)
    found = attributed(model, batch, v)
    truth = double_backward(model, batch, v)
    scale = sum(abs(share.value) for share in found.shares)
    assert abs(found.total - truth) < 1e-10 * scale
    assert found.residual < 1e-10 * scale
    assert (
        len({share.site.split(".")[1] for share in found.shares if "." in share.site})
        == 12
    )


def test_products_agree_with_matrices() -> None:
    model, batch, matrices = one_layer()
    v = direction(model)
    flat = torch.cat([t.flatten() for t in v.values()])
    for share in attributed(model, batch, v).shares:
        wanted = float(flat @ matrices[share.site, share.kind] @ flat)
        assert share.value == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_curvature_along_one_group_needs_only_that_group() -> None:
    model, batch = gpt()
    v = {n: t for n, t in direction(model).items() if "blocks.0.attention." in n}
    whole = {n: v.get(n, torch.zeros_like(p)) for n, p in model.named_parameters()}
    some, every = attributed(model, batch, v), attributed(model, batch, whole)
    assert some.total == pytest.approx(every.total, rel=1e-12)
    assert some.residual < 1e-12


def test_micro_batches_add_up_to_the_batch() -> None:
    model, _ = gpt()
    rng = torch.Generator().manual_seed(3)
    batch = tuple(torch.randint(0, 3, (4, 3), generator=rng) for _ in range(2))
    v = direction(model)
    whole, parts = (attributed(model, batch, v, micro_batch=n) for n in (None, 1))
    assert whole.by_sublayer() == pytest.approx(parts.by_sublayer(), rel=1e-9)


def test_trace_is_the_mean_over_signs() -> None:
    model, batch, matrices = one_layer()
    rng = torch.Generator().manual_seed(0)
    found = trace_attributed(model, batch, probes=24, generator=rng)
    truth = sum(float(m.trace()) for m in matrices.values())
    h = torch.stack(list(matrices.values())).sum(0)
    spread = (2 * (h.square().sum() - h.diagonal().square().sum()) / 24).sqrt()
    assert abs(found.total - truth) < 4 * float(spread)


def test_every_kind_of_model_of_the_lab() -> None:
    torch.manual_seed(0)
    size = {"image": 4, "patch": 2, "channels": 1, "classes": 3, "depth": 2}
    model = ViT(ViTConfig(width=4, heads=2, **size)).double()
    batch = torch.randn(2, 1, 4, 4).double(), torch.tensor([0, 2])
    found = attributed(model, batch, direction(model))
    assert found.residual < 1e-10 * sum(abs(s.value) for s in found.shares)
    named = set(found.by_sublayer())
    assert {"blocks.0.attention", "blocks.1.feedforward", "final_norm", "loss"} <= named


class Odd(nn.Module):
    """Operations without a rule of their own, in place, several results, a division."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]).double())
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.a
        y.mul_(torch.exp(self.a))
        values, _ = torch.sort(torch.sin(y) / (1 + self.a**2))
        low, high = torch.stack([values, y.cos()]).unbind(0)
        pair = torch.aminmax(torch.log(2 + self.a**2 * low))
        z = torch.cat([low * high, pair.max[None]])[None, None]
        return self.attention(z, z, z, need_weights=False)[0].sum(1)


def test_operations_without_a_rule() -> None:
    torch.manual_seed(0)
    model = Odd().double()
    batch = torch.tensor([[1.0, 2.0, 3.0]]).double()[0], torch.ones(1, 4).double()
    found = attributed(model, batch, direction(model))
    at = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    v = direction(model)
    with sdpa_kernel(SDPBackend.MATH):
        loss = F.mse_loss(functional_call(model, at, (batch[0],)), batch[1])
        slopes = torch.autograd.grad(loss, list(at.values()), create_graph=True)
        along = sum((s * v[n]).sum() for s, n in zip(slopes, at, strict=True))
        bent = torch.autograd.grad(along, list(at.values()), materialize_grads=True)
    truth = float(sum((b * v[n]).sum() for b, n in zip(bent, at, strict=True)))
    assert found.total == pytest.approx(truth, rel=1e-10)
    assert found.residual < 1e-10 * abs(truth)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_from_elsewhere(attention: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=7,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).double().eval()
    tokens = torch.randint(0, 7, (2, 5))
    found = attributed(model, {"input_ids": tokens}, direction(model))
    scale = sum(abs(share.value) for share in found.shares)
    # Its norms and its rotary tables are computed in float32 whatever it is given.
    assert found.residual < 1e-5 * scale
    kinds = {s.site: s.kind for s in found.shares}
    assert kinds["model.layers.1.input_layernorm"] == "norm"
    names = set(found.by_sublayer())
    assert {"model.layers.0.self_attn", "model.layers.1.mlp", "model.norm"} <= names


class Opaque(torch.autograd.Function):
    """A kernel of somebody's own, with a backward pass and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Closed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Opaque.apply(super().forward(x))


def test_an_operation_without_forward_derivative_is_named() -> None:
    model = Closed(2, 2)
    with pytest.raises(InputError, match="cannot be differentiated forward"):
        attributed(model, (torch.ones(1, 2), torch.ones(1, 2)), direction(model))


def test_single_precision_reports_its_summation_error() -> None:
    model, batch = gpt()
    found = attributed(model.float(), batch, direction(model))
    scale = sum(abs(share.value) for share in found.shares)
    # Two orders of summation of some 1e3 float32 terms.
    assert 0 < found.residual < 1e-4 * scale


def test_the_model_is_unchanged() -> None:
    model, batch = gpt()
    model.train()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    attributed(model, batch, direction(model))
    after = model.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_unusable_input_is_an_error() -> None:
    model, batch = gpt()
    rng = torch.Generator().manual_seed(0)
    with pytest.raises(InputError, match="no parameter"):
        attributed(model, batch, {"nobody": torch.ones(1)})
    name = "token_embedding.weight"
    with pytest.raises(InputError, match="direction of"):
        attributed(model, batch, {name: torch.ones(1)})
    with pytest.raises(InputError, match="probes"):
        trace_attributed(model, batch, probes=0, generator=rng)
    with pytest.raises(InputError, match="no attribution"):
        combined([])
    wide = nn.Linear(70, 70)
    with pytest.raises(InputError, match="at most 4096"):
        node_hessians(wide, (torch.ones(1, 70), torch.ones(1, 70)))


def test_shares_are_grouped_in_the_order_of_the_network() -> None:
    shares = [
        CurvatureShare(site="h.0.ln", kind="norm", value=1.0),
        CurvatureShare(site="h.0.attn.c_attn", kind="projection", value=2.0),
        CurvatureShare(site="h.0.attn", kind="softmax", value=3.0),
        CurvatureShare(site="", kind="loss", value=4.0),
    ]
    found = Attribution(shares=tuple(shares), total=10.0, residual=0.0)
    assert list(found.by_sublayer().items()) == [
        ("h.0.ln", 1.0),
        ("h.0.attn", 5.0),
        ("loss", 4.0),
    ]
    assert found.by_kind()["softmax"] == 3.0
