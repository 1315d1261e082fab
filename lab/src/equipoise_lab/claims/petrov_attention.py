"""Petrov et al. (2025): what is claimed of the curvature of attention."""

import torch
from torch import Tensor
from torch.autograd.functional import hessian

from equipoise.theory.curvature.softmax import UNFOLDED_SUPREMUM, softmax_hessian
from equipoise.theory.lipschitz.heads import Heads
from equipoise.theory.softmax_norms import softmax_jacobian_norm
from equipoise_lab.claims.result import PETROV, Found, judged
from equipoise_lab.theory.curvature.attention_blocks import attention_hessian
from equipoise_lab.theory.curvature.petrov import (
    PetrovLayer,
    petrov_attention_bound,
    two,
)


@PETROV.claim("Thm 1", kind="theorem")
def keys_are_missing_from_the_maximum() -> Found:
    """The bound and the KK block at a global minimum with W_K = 0, at two W_Q.

    Claim: The Hessian of attention is at most 3·max over VV, QQ, VQ and QK.

    Instead: All six blocks: ‖H‖ ≤ ‖N‖₂ with N the matrix of block norms from the
    moments of each query (attention_curvature_bound).

    Practice: Theorem 1 is no bound; use `equipoise curvature` or the moment form.
    """
    bounds, truths = [], []
    for t in (1.0, 1e3):
        layer = _layer(t)
        bounds.append(petrov_attention_bound(layer))
        truths.append(two(_block(layer, "k")))
    numbers = {
        "bound at W_Q = I": bounds[0],
        "bound at W_Q = 1000·I": bounds[1],
        "norm of the KK block at W_Q = I": truths[0],
        "norm of the KK block at W_Q = 1000·I": truths[1],
    }
    return judged({"KK is within it": truths[1] <= bounds[1]}, numbers)


@PETROV.claim("proof of Thm 1", kind="theorem")
def softmax_is_not_flat() -> Found:
    """‖∂A/∂T‖ of a uniform row of 32 keys, and of (½, ½, 0, …).

    Claim: The Jacobian of a softmax row over L keys has norm at most 1/L.

    Instead: ‖J‖ ≤ min(max 2a(1−a), max a) ≤ ½; ∂A/∂T is the direct sum of rows.
    """
    a = torch.zeros(32, dtype=torch.float64)
    a[:2] = 0.5
    truth = float(softmax_jacobian_norm(a))
    uniform = float(softmax_jacobian_norm(torch.full_like(a, 1 / 32)))
    numbers = {
        "claimed at L = 32": 1 / 32,
        "at (1/2, 1/2, 0, ...)": truth,
        "min(max 2a(1−a), max a) there": float(min((2 * a * (1 - a)).max(), a.max())),
        "at a uniform row": uniform,
    }
    ours = truth <= numbers["min(max 2a(1−a), max a) there"] + 1e-12
    return judged({"at every row": truth <= 1 / 32}, numbers, instead=ours)


@PETROV.claim("appendix, ‖G_Q‖", kind="definition")
def query_jacobian_does_not_shrink_with_length() -> Found:
    """‖∂F/∂W_Q‖ beside the bound: 32 tokens, of which two attend to each other.

    Claim: ‖∂F/∂W_Q‖ ≤ ‖W_V‖‖W_K‖‖X‖³/(L√d_K).

    Instead: ‖J_Q‖ ≤ s‖X‖·max_i‖W_VᵀΣ_iW_K‖, Σ_i the covariance of the keys.
    """
    layer = sharp_layer(value_scale=1.0)
    L, _, E = layer.sizes
    x, _, k, v = layer.norms

    def output(w: Tensor) -> Tensor:
        return _with(layer, w_q_DE=w).output

    jacobian = torch.func.jacfwd(output)(layer.w_q_DE).flatten(2).flatten(0, 1)
    claimed = v * k * x**3 / (L * E**0.5)
    numbers = {"claimed": claimed, "norm": two(jacobian), "L": float(L)}
    return judged({"the norm is within it": two(jacobian) <= claimed}, numbers)


@PETROV.claim("lemma on Φ", kind="lemma")
def uniform_attention_is_curved() -> Found:
    """Norms of Φ_VQ and Φ_QQ of a random layer at W_Q = 0.

    Claim: With uniform attention the second derivatives Φ_VQ and Φ_QQ vanish.

    Instead: Φ_VQ is the covariance of the tokens under a, which is not zero for uniform
    weights; and Φ, a derivative of the output, has no factor 2/(L·d).
    """
    layer = _with(_random(0), w_q_DE=torch.zeros(4, 3, dtype=torch.float64))
    vq, qq = (_unfolded(layer, name) for name in ("vq_DFDE", "qq_DEDE"))
    L, D, _ = layer.sizes
    numbers = {
        "norm of Φ_VQ at W_Q = 0": vq,
        "norm of Φ_QQ at W_Q = 0": qq,
        "norm of Φ_VQ as printed": 2 / (L * D) * vq,
    }
    return judged({"Φ_VQ vanishes": vq < 1e-9, "Φ_QQ vanishes": qq < 1e-9}, numbers)


@PETROV.claim("lemma on ∂²A/∂T²", kind="lemma")
def softmax_second_derivative_is_not_its_largest_block() -> Found:
    """The norm of ∂²A/∂T², unfolded, of a row of two keys, and of its blocks.

    Claim: The norm of the unfolded second derivative is its largest block's.

    Instead: Blocks are stacked, not on a diagonal. The bound 6 survives: the supremum
    is √(2/27).
    """
    a = torch.tensor([(3 - 3**0.5) / 6, (3 + 3**0.5) / 6], dtype=torch.float64)
    blocks = torch.stack([softmax_hessian(a, e) for e in torch.eye(2).double()])
    largest = max(two(block) for block in blocks)
    whole = two(blocks.flatten(0, 1))
    numbers = {
        "largest block": largest,
        "unfolded": whole,
        "supremum over rows": UNFOLDED_SUPREMUM,
        "their bound": 6.0,
    }
    parts = {"the norm is the largest block's": whole <= largest + 1e-12}
    ours = abs(whole - UNFOLDED_SUPREMUM) < 1e-9
    return judged(parts, numbers, instead=ours)


@PETROV.claim("ours, on Figs 3–5: at every input scale", kind="lemma")
def which_block_is_largest_depends_on_the_input() -> Found:
    """Norms of the VV, QQ and KK blocks of one random layer at three input scales.

    Claim: The Value–Value block dominates the curvature of attention whatever the
    scale of its input.

    Rule: One part for each scale: VV is the largest of the three there.

    Instead: At a small scale it does. VV grows as ‖X‖², QQ and KK up to ‖X‖⁶: the order
    is that of the input's scale.
    """
    evidence: dict[str, float] = {}
    winners = []
    base = _random(0)
    for scale in (0.3, 1.0, 3.0):
        layer = _with(base, x_LD=scale * base.x_LD)
        norms = {name: two(_block(layer, name)) for name in "qkv"}
        winners.append(max(norms, key=lambda name: norms[name]))
        evidence |= {f"{n.upper()} at scale {scale}": norms[n] for n in "qkv"}
    scales = (0.3, 1.0, 3.0)
    parts = {f"at {s:g}": n == "v" for s, n in zip(scales, winners, strict=True)}
    return judged(parts, evidence)


@PETROV.claim("ours, on the slides' table of orders", kind="theorem")
def value_curvature_is_quadratic_in_the_input() -> Found:
    """Exponent of ‖VV‖ over the scale of the input, uniform attention.

    Claim: The Value–Value block is of order ‖X‖⁴, as later slides have it (the paper's
    Theorem 1 says ‖X‖²).

    Instead: VV = (2/(L·d))·(AX)ᵀAX ⊗ I: order ‖X‖², as Theorem 1 has it.
    """
    base = _with(_random(0), w_q_DE=torch.zeros(4, 3, dtype=torch.float64))
    one, ten = (two(_block(_with(base, x_LD=c * base.x_LD), "v")) for c in (1.0, 10.0))
    power = float(torch.tensor(ten / one).log10())
    numbers = {"exponent measured": power, "exponent of Thm 1": 2.0}
    return judged({"order ‖X‖⁴": power > 3}, numbers, instead=abs(power - 2) < 0.01)


def sharp_layer(*, value_scale: float) -> PetrovLayer:
    """Return 32 tokens of which two attend to each other equally and to no other."""
    L, D = 32, 34
    x = torch.zeros(L, D, dtype=torch.float64)
    x[:, 2:] = torch.eye(L, dtype=torch.float64)
    x[:2] = 0
    x[0, :2], x[1, :2] = torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])
    q, k = (torch.zeros(D, 2, dtype=torch.float64) for _ in range(2))
    q[0, 0], k[0, 0], k[1, 1] = 60.0, 1.0, 1.0
    v = torch.zeros(D, D, dtype=torch.float64)
    v[1, 2] = value_scale
    return PetrovLayer(
        x_LD=x, w_q_DE=q, w_k_DE=k, w_v_DD=v, target_LD=torch.zeros_like(x)
    )


def _layer(t: float) -> PetrovLayer:
    rng = torch.Generator().manual_seed(0)
    x, v = (torch.randn(4, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    eye = torch.eye(3, dtype=torch.float64)
    layer = PetrovLayer(
        x_LD=x, w_q_DE=t * eye, w_k_DE=0 * eye, w_v_DD=v[:3], target_LD=x
    )
    return _with(layer, target_LD=layer.output)


def _random(seed: int) -> PetrovLayer:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    return PetrovLayer(
        x_LD=normal(5, 4),
        w_q_DE=normal(4, 3),
        w_k_DE=normal(4, 3),
        w_v_DD=normal(4, 4),
        target_LD=normal(5, 4),
    )


def _with(layer: PetrovLayer, **changed: Tensor) -> PetrovLayer:
    names = ("x_LD", "w_q_DE", "w_k_DE", "w_v_DD", "target_LD")
    return PetrovLayer(**{n: changed.get(n, getattr(layer, n)) for n in names})


_WEIGHTS = {"q": "w_q_DE", "k": "w_k_DE", "v": "w_v_DD"}


def _block(layer: PetrovLayer, name: str) -> Tensor:
    """Return the Hessian of the mean squared error in one weight, by autograd."""
    weight: Tensor = getattr(layer, _WEIGHTS[name])

    def loss(w: Tensor) -> Tensor:
        moved = _with(layer, **{_WEIGHTS[name]: w})
        return (moved.output - layer.target_LD).square().mean()

    found: Tensor = hessian(loss, weight)
    return found.reshape(weight.numel(), -1)


def _unfolded(layer: PetrovLayer, name: str) -> float:
    """Return the norm of a second derivative of the output, all outputs stacked."""
    eye = torch.eye(layer.x_LD.shape[1], dtype=torch.float64)
    heads = Heads(
        w_q_HDE=layer.w_q_DE[None],
        w_k_GDE=layer.w_k_DE[None],
        w_v_GDF=layer.w_v_DD[None],
        w_o_HFD=eye[None],
    )
    size = layer.x_LD.numel()
    cotangents = torch.eye(size, dtype=torch.float64).reshape(size, *layer.x_LD.shape)
    blocks = [
        getattr(attention_hessian(heads, layer.x_LD, g, output=False), name)[0]
        for g in cotangents
    ]
    return two(torch.cat([block.flatten(2).flatten(0, 1) for block in blocks]))
