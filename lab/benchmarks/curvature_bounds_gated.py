"""Bounds on curvature with rotated keys and gated nets, against the truth."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.fragility_subjects import trained_gpt
from benchmarks.table import publish
from equipoise.theory.lipschitz.heads import Heads, Rotary
from equipoise_lab.models.block import angles
from equipoise_lab.theory.curvature.attention_bounds import (
    attention_curvature_bound,
    top,
)
from equipoise_lab.theory.curvature.block_bounds import (
    PostNormBlock,
    block_curvature_bound,
)
from equipoise_lab.theory.curvature.feedforward import FeedForwardCurvature
from lab.benchmarks.curvature_bounds import LAB, Row, largest, read_by, summary
from lab.tests.theory.test_curvature_bounds_blocks import KINDS

MODERN = {
    "positions": "rope",
    "activation": "swiglu",
    "qkv_bias": False,
    "output_bias": False,
    "ffn_bias": False,
}
QKV = [f"{name}.weight" for name in LAB[:3]]
NET = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


def truth(module: nn.Module, x_LD: Tensor, names: Sequence[str]) -> float:
    """Return ‖H‖ of the mean squared distance of a module's output from its input."""
    weights = dict(module.named_parameters())

    def loss(*given: Tensor) -> Tensor:
        moved = weights | dict(zip(names, given, strict=True))
        out = functional_call(module, moved, (x_LD[None],))
        return (out[0] - x_LD).square().mean()

    with sdpa_kernel(SDPBackend.MATH):
        return largest(loss, [weights[name] for name in names])


def heads_of(attention: nn.Module, length: int) -> Heads:
    count, width = attention.config.heads, attention.config.per_head
    q, k, v = (
        attention.get_submodule(name).weight.detach().unflatten(0, (count, width)).mT
        for name in LAB[:3]
    )
    angle_LR = angles(length, width // 2).repeat_interleave(2, -1).double()
    turning = Rotary(cos_LR=angle_LR.cos(), sin_LR=angle_LR.sin(), interleaved=True)
    return Heads(
        w_q_HDE=q,
        w_k_GDE=k,
        w_v_GDF=v,
        w_o_HFD=attention.o_proj.weight.detach().mT.unflatten(0, (count, width)),
        rotary=turning,
        causal=True,
    )


def slope(module: nn.Module, x_LD: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Return the loss's gradient at the output, and its curvature there."""
    with torch.no_grad():
        off_LD = module(x_LD[None])[0] - x_LD
    per_entry = 2 / x_LD.numel()
    return per_entry * off_LD, {"loss_curvature": per_entry}


def layer_row(attention: nn.Module, x_LD: Tensor) -> Row:
    g_LD, given = slope(attention, x_LD)
    bound = attention_curvature_bound(
        heads_of(attention, len(x_LD)), x_LD, g_LD, **given
    )
    return {"truth": truth(attention, x_LD, QKV), "ours": bound.value}


def block_row(block: nn.Module, x_LD: Tensor) -> Row:
    net, first = block.feedforward, block.attention_norm
    gate, up, down = (net.get_parameter(name).detach().mT for name in NET)
    held = PostNormBlock(
        heads=heads_of(block.attention, len(x_LD)),
        net=FeedForwardCurvature(
            w_in_DM=gate, w_up_DM=up, w_out_MO=down, activation="silu"
        ),
        gain_1_D=first.weight.detach(),
        gain_2_D=block.feedforward_norm.weight.detach(),
        shift_1_D=first.bias.detach(),
        eps=first.eps,
    )
    names = [f"attention.{n}" for n in QKV] + [f"feedforward.{n}" for n in NET]
    g_LD, given = slope(block, x_LD)
    ours = block_curvature_bound(held, x_LD, g_LD, **given)
    return {"truth": truth(block, x_LD, names), "ours": ours}


def trained_rows() -> dict[str, list[Row]]:
    pre, ids = trained_gpt(**MODERN)
    layers = [block.attention for block in pre.blocks]
    post, _ = trained_gpt(**MODERN, residual="post")
    read = read_by(pre, layers, lambda model: model(ids))
    entered = read_by(post, list(post.blocks), lambda model: model(ids))
    return {
        "lab GPT with RoPE, attention layers": list(map(layer_row, layers, read)),
        "lab post-LN GPT with RoPE and SwiGLU, blocks": list(
            map(block_row, post.blocks, entered)
        ),
    }


def random_rows(kind: str) -> list[Row]:
    cases = map(KINDS[kind], range(500, 700))
    return [{"truth": top(case.hessian()), "ours": case.bound()} for case in cases]


def main() -> None:
    torch.set_num_threads(1)
    found = trained_rows()
    found |= {f"random blocks, {kind}": random_rows(kind) for kind in KINDS}
    table = [summary(name, rows) for name, rows in found.items()]
    publish("curvature_bounds_gated", table, cases=found)


if __name__ == "__main__":
    main()
