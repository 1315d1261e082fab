"""Bounds on curvature against the truth, on random layers and on trained ones."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from benchmarks.fragility_subjects import minilm, trained_gpt, trained_vit
from benchmarks.table import publish
from equipoise.theory.lipschitz.heads import Heads
from equipoise_lab.theory.curvature.attention_bounds import (
    attention_curvature_bound,
    attention_norm_bound,
    top,
)
from equipoise_lab.theory.curvature.block_bounds import (
    PostNormBlock,
    block_curvature_bound,
)
from equipoise_lab.theory.curvature.feedforward import FeedForwardCurvature
from equipoise_lab.theory.curvature.petrov import (
    PetrovLayer,
    petrov_attention_bound,
    petrov_block_bound,
)
from lab.tests.theory import curvature_layers as layers

Row = dict[str, Any]


def largest(function: Callable[..., Tensor], at: Sequence[Tensor]) -> float:
    """Return ‖H‖ of a function of some weights, by Lanczos on double backward."""
    leaves = [x.detach().requires_grad_() for x in at]
    slopes = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
    slope = torch.cat([s.flatten() for s in slopes])

    def product(v: numpy.ndarray) -> numpy.ndarray:
        given = torch.from_numpy(v.ravel().copy())
        found = torch.autograd.grad(
            slope, leaves, given, retain_graph=True, materialize_grads=True
        )
        return torch.cat([f.flatten() for f in found]).numpy()

    size = len(slope)
    operator = LinearOperator((size, size), matvec=product, dtype=numpy.float64)
    start = numpy.random.default_rng(0).standard_normal(size)
    found = eigsh(
        operator, 1, which="LM", v0=start, tol=1e-4, return_eigenvectors=False
    )
    return float(abs(found[0]))


@dataclass(frozen=True)
class Layer:
    """A trained attention layer and what it read, in float64."""

    heads: Heads
    x_LD: Tensor
    seen: Tensor

    def output(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h = self.heads
        scores = _by_head(self.x_LD, q, h.b_q_HE) @ _by_head(self.x_LD, k, h.b_k_GE).mT
        rows = (scores * h.slope).masked_fill(~self.seen, -torch.inf).softmax(-1)
        return (rows @ _by_head(self.x_LD, v, h.b_v_GF) @ h.w_o_HFD).sum(0)

    def row(self) -> Row:
        weights = self.heads.weights[:3]
        entries = self.x_LD.numel()
        off = self.output(*weights) - self.x_LD
        truth = largest(
            lambda *w: (self.output(*w) - self.x_LD).square().mean(), weights
        )
        ours = attention_curvature_bound(
            self.heads,
            self.x_LD,
            2 / entries * off,
            loss_curvature=2 / entries,
            mask=self.seen,
        )
        return {"truth": truth, "ours": ours.value}

    def single(self, h: int) -> PetrovLayer:
        """Return one head in the paper's setting: tokens (x, 1) carry the biases."""
        heads, D = self.heads, self.x_LD.shape[1]
        ones = self.x_LD.new_ones(len(self.x_LD), 1)
        x_LD = torch.cat([self.x_LD, ones], 1)
        v_DD = x_LD.new_zeros(D + 1, D + 1)
        v_DD[:, :D] = _with(heads.w_v_GDF[h], heads.b_v_GF, h) @ heads.w_o_HFD[h]
        return PetrovLayer(
            x_LD=x_LD,
            w_q_DE=_with(heads.w_q_HDE[h], heads.b_q_HE, h),
            w_k_DE=_with(heads.w_k_GDE[h], heads.b_k_GE, h),
            w_v_DD=v_DD,
            target_LD=x_LD,
        )


def _with(w_DE: Tensor, bias: Tensor | None, h: int) -> Tensor:
    row = w_DE.new_zeros(1, w_DE.shape[1]) if bias is None else bias[h][None]
    return torch.cat([w_DE, row])


def _by_head(x_LD: Tensor, w_HDE: Tensor, b_HE: Tensor | None) -> Tensor:
    out = x_LD @ w_HDE
    return out if b_HE is None else out + b_HE[:, None]


def single_row(layer: PetrovLayer) -> Row:
    """Return truth, ours and the paper's for one head, no mask, target its input."""
    entries = layer.x_LD.numel()
    weights = (layer.w_q_DE, layer.w_k_DE, layer.w_v_DD)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = layers.layer_output(layer.x_LD, q, k, v)
        return (out - layer.target_LD).square().mean()

    g = 2 / entries * (layer.output - layer.target_LD)
    heads, given = layers.heads_of(layer), {"loss_curvature": 2 / entries}
    return {
        "truth": largest(loss, weights),
        "ours": attention_curvature_bound(heads, layer.x_LD, g, **given).value,
        "from norms": attention_norm_bound(heads, layer.x_LD, g, **given),
        "paper": petrov_attention_bound(layer),
    }


def _heads(module: Any, names: Sequence[str], count: int, *, causal: bool) -> Heads:
    q, k, v, o = (module.get_submodule(name).double() for name in names)

    def split(linear: nn.Linear) -> tuple[Tensor, Tensor]:
        weight = linear.weight.detach().reshape(count, -1, linear.weight.shape[1]).mT
        return weight, linear.bias.detach().reshape(count, -1)

    (w_q, b_q), (w_k, b_k), (w_v, b_v) = split(q), split(k), split(v)
    return Heads(
        w_q_HDE=w_q,
        w_k_GDE=w_k,
        w_v_GDF=w_v,
        w_o_HFD=o.weight.detach().mT.reshape(count, -1, len(o.weight)),
        b_q_HE=b_q,
        b_k_GE=b_k,
        b_v_GF=b_v,
        causal=causal,
    )


def read_by(model: nn.Module, modules: Sequence[nn.Module], run: Any) -> list[Tensor]:
    """Return what each module read, one sequence of it."""
    heard: list[Tensor] = []
    handles = [
        m.register_forward_pre_hook(lambda m, a: heard.append(a[0][0].detach()))
        for m in modules
    ]
    with torch.no_grad():
        run(model.double())
    for handle in handles:
        handle.remove()
    return heard


def _layer(heads: Heads, x_LD: Tensor) -> Layer:
    seen = torch.ones(len(x_LD), len(x_LD), dtype=torch.bool)
    return Layer(heads, x_LD, seen.tril() if heads.causal else seen)


LAB = ("q_proj", "k_proj", "v_proj", "o_proj")
BERT = ("self.query", "self.key", "self.value", "output.dense")


def lab_layers(model: nn.Module, batch: Tensor, *, causal: bool) -> list[Layer]:
    modules = [block.attention for block in model.blocks]
    read = read_by(model, modules, lambda m: m(batch))
    return [
        _layer(_heads(module, LAB, 4, causal=causal), x)
        for module, x in zip(modules, read, strict=True)
    ]


def bert_layers() -> Iterator[tuple[Layer, PostNormBlock]]:
    model, batch = minilm()
    read = read_by(model, model.encoder.layer, lambda m: m(**batch))
    for module, x in zip(model.encoder.layer, read, strict=True):
        heads = _heads(module.attention, BERT, 12, causal=False)
        first, second = module.attention.output.LayerNorm, module.output.LayerNorm
        net = FeedForwardCurvature(
            w_in_DM=module.intermediate.dense.weight.detach().mT,
            b_in_M=module.intermediate.dense.bias.detach(),
            w_out_MO=module.output.dense.weight.detach().mT,
        )
        yield (
            _layer(heads, x),
            PostNormBlock(
                heads=heads,
                net=net,
                gain_1_D=first.weight.detach(),
                gain_2_D=second.weight.detach(),
                shift_1_D=first.bias.detach(),
                eps=first.eps,
                b_o_D=module.attention.output.dense.bias.detach(),
                b_out_D=module.output.dense.bias.detach(),
            ),
        )


def block_row(layer: Layer, block: PostNormBlock) -> Row:
    """Return truth and ours for a whole post-norm block; the output's shift is held."""
    x, net, entries = layer.x_LD, block.net, layer.x_LD.numel()

    def output(q: Tensor, k: Tensor, v: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        normed, shape = nn.functional.layer_norm, block.gain_1_D.shape
        first = x + layer.output(q, k, v) + block.b_o_D
        y = normed(first, shape, block.gain_1_D, block.shift_1_D, block.eps)
        second = y + nn.functional.gelu(y @ w_in + net.b_in_M) @ w_out + block.b_out_D
        return normed(second, shape, block.gain_2_D, None, block.eps)

    weights = (*block.heads.weights[:3], net.w_in_DM, net.w_out_MO)
    truth = largest(lambda *w: (output(*w) - x).square().mean(), weights)
    g = 2 / entries * (output(*weights) - x)
    ours = block_curvature_bound(block, x, g, loss_curvature=2 / entries)
    return {"truth": truth, "ours": ours}


def random_rows(scale: float) -> list[Row]:
    return [
        single_row(layers.random_layer(seed, scale=scale)) for seed in range(500, 530)
    ]


def random_block_rows() -> list[Row]:
    rows = []
    for seed in range(500, 530):
        block = layers.random_block(seed)
        x, target = block.attention.x_LD, block.attention.target_LD
        out = layers.block_output(x, *layers.block_weights(block))
        ours = block_curvature_bound(
            layers.post_norm(block),
            x,
            2 / x.numel() * (out - target),
            loss_curvature=2 / x.numel(),
        )
        truth = top(layers.block_hessian(block))
        rows.append({"truth": truth, "ours": ours, "paper": petrov_block_bound(block)})
    return rows


def summary(name: str, rows: Sequence[Row]) -> Row:
    """Return median and extreme ratios to the truth, and how often a bound broke."""
    found: Row = {"subject": name, "cases": len(rows)}
    found["truth"] = statistics.median(row["truth"] for row in rows)
    for kind in ("ours", "from norms", "paper"):
        ratios = [row[kind] / row["truth"] for row in rows if kind in row]
        if ratios:
            found[f"{kind}/truth"] = statistics.median(ratios)
            found[f"{kind} least"] = min(ratios)
            # Lanczos stops at 1e-4: less than that is not a violation.
            found[f"{kind} broken"] = sum(r < 1 - 1e-4 for r in ratios)
    return found


def subjects() -> Iterator[tuple[str, list[Row]]]:
    """Yield what was looked at, trained layers first."""
    pairs = list(bert_layers())
    yield "MiniLM, attention layers", [layer.row() for layer, _ in pairs]
    yield (
        "MiniLM, single heads",
        [single_row(layer.single(h)) for layer, _ in pairs for h in (0, 5)],
    )
    yield "MiniLM, blocks", [block_row(*pair) for pair in pairs]
    vit, images = trained_vit()
    seen = lab_layers(vit, images.double(), causal=False)
    yield "lab ViT, attention layers", [layer.row() for layer in seen]
    yield (
        "lab ViT, single heads",
        [single_row(layer.single(h)) for layer in seen for h in range(4)],
    )
    gpt = lab_layers(*trained_gpt(), causal=True)
    yield "lab GPT, attention layers", [layer.row() for layer in gpt]
    for scale in (0.3, 1.0, 3.0):
        yield f"random layer, scale {scale}", random_rows(scale)
    yield "random block", random_block_rows()


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for name, rows in subjects():
        found[name] = rows
        print(summary(name, rows), flush=True)
    table = [summary(name, rows) for name, rows in found.items()]
    publish("curvature_bounds", table, cases=found)


if __name__ == "__main__":
    main()
