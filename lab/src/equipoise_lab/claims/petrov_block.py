"""Petrov et al. (2025): claims on norms, feed-forward nets, blocks and sample size."""

import math

import torch
from torch import Tensor

from equipoise.theory.curvature.norm import norm_curvature_unfolded
from equipoise.theory.lipschitz.heads import Heads
from equipoise_lab.claims.petrov_attention import sharp_layer
from equipoise_lab.claims.result import PETROV, Found, judged, judged_pattern
from equipoise_lab.theory.curvature import petrov
from equipoise_lab.theory.curvature.block_bounds import (
    PostNormBlock,
    block_curvature_bound,
)
from equipoise_lab.theory.curvature.feedforward import (
    FeedForwardCurvature,
    feedforward_hessian,
    feedforward_norms,
)
from equipoise_lab.theory.curvature.petrov import layer_norm, two


@PETROV.claim("Thm 6", kind="theorem")
def block_bound_is_exceeded() -> Found:
    """Theorem 6 at zero loss, with true LayerNorm norms and ‖∂F/∂W_Q‖ as printed.

    Claim: The Hessian of a block is at most 5·max over pairs of weights.

    Instead: Sum the nodes: ‖∇²⟨λ, φ⟩‖·‖J_a‖‖J_b‖ into a matrix of norms
    (block_curvature_bound).
    """
    block = _sharp_block()
    layer = block.attention

    def output(w_k: Tensor) -> Tensor:
        moved = petrov.PetrovLayer(
            x_LD=layer.x_LD,
            w_q_DE=layer.w_q_DE,
            w_k_DE=w_k,
            w_v_DD=layer.w_v_DD,
            target_LD=layer.target_LD,
        )
        first = layer.x_LD + moved.output
        y = layer_norm(first)
        return layer_norm(y + (y @ block.w_1_DM).relu() @ block.w_2_MD)

    jacobian = torch.func.jacfwd(output)(layer.w_k_DE).flatten(2).flatten(0, 1)
    # The residual is zero, so the KK block of the Hessian is Gauss–Newton's.
    truth = 2 / layer.x_LD.numel() * two(jacobian) ** 2
    claimed, ours = petrov.petrov_block_bound(block), _ours(block)
    numbers = {"claimed": claimed, "norm of the KK block": truth, "ours": ours}
    parts = {"the KK block is within it": truth <= claimed}
    return judged(parts, numbers, instead=truth <= ours)


@PETROV.claim("last appendix, norm lemma", kind="lemma")
def norm_lemma_needs_the_deviation() -> Found:
    """The LayerNorm lemma with σ_min the smallest row norm: one zero-mean row of 16.

    Claim: ‖J‖ ≤ 1/σ_min + ‖X‖²/(√n σ_min³) with σ_min the smallest row norm.

    Instead: ‖J‖ = 1/s exactly, and ‖∂²LN/∂x²‖ = √ρ·√max(n−2+9(1−ρ)², 2)/(√n s²).
    """
    x = torch.tensor([1.0, -1.0] * 8, dtype=torch.float64)[None]
    n, norm, std = 16, float(x.norm()), float(x.std(correction=0))
    jacobian = torch.func.jacrev(layer_norm)(x).reshape(n, n)
    truth, whole = two(jacobian), float(norm_curvature_unfolded(x, eps=0.0)[0])

    def first(sigma: float) -> float:
        return 1 / sigma + norm**2 / (math.sqrt(n) * sigma**3)

    numbers = {
        "claimed": first(norm),
        "norm of the Jacobian": truth,
        "1/s": 1 / std,
        "claimed with the standard deviation": first(std),
        "norm of the second derivative": whole,
    }
    parts = {"the Jacobian is within it": truth <= first(norm)}
    return judged(parts, numbers, instead=math.isclose(truth, 1 / std))


@PETROV.claim("ours, on summaries of the paper", kind="definition")
def deviation_is_not_a_singular_value() -> Found:
    """σ_min read as a singular value: one row far from 0 that hardly varies.

    Claim: As summaries have it, LayerNorm's derivative is bounded by the minimum
    singular value of its input.

    Instead: The paper's σ_min is the smallest deviation of a row. Of asymptotic bounds,
    computational efficiency and guarantees of stability, which summaries name too, we
    found nothing in the paper.
    """
    x = torch.tensor([[99.0, 100.0, 101.0]], dtype=torch.float64)
    truth = two(torch.func.jacrev(layer_norm)(x).reshape(3, 3))
    values = float(torch.linalg.svdvals(x).min())
    deviation = float(x.std(correction=0))
    read = 1 / values + float(x.norm()) ** 2 / (math.sqrt(3) * values**3)
    numbers = {
        "claimed with the singular value": read,
        "norm of the Jacobian": truth,
        "1 ÷ the deviation": 1 / deviation,
    }
    parts = {"the Jacobian is within it": truth <= read}
    return judged(parts, numbers, instead=truth <= 1 / deviation + 1e-9)


@PETROV.claim("last appendix, norm lemma", kind="lemma")
def norm_lemma_has_a_term_of_wrong_degree() -> Found:
    """How the second derivative, and the lemma's middle term, fall as x grows by 100.

    Claim: ‖X‖²/(√n σ³) is a term of the second derivative of LayerNorm.

    Instead: Every term of the second derivative is of degree −2.
    """
    x = torch.linspace(-1, 1, 16, dtype=torch.float64)[None]
    small, large = (
        float(norm_curvature_unfolded(c * x, eps=0.0)[0]) for c in (1.0, 100.0)
    )
    middle = [
        float(y.norm()) ** 2 / (4 * float(y.std(correction=0)) ** 3)
        for y in (x, 100 * x)
    ]
    fall, theirs = small / large, middle[0] / middle[1]
    numbers = {
        "fall of the second derivative (degree −2: 10,000)": fall,
        "fall of the middle term": theirs,
    }
    parts = {"both are of one degree": abs(theirs / fall - 1) < 0.01}
    return judged(parts, numbers, instead=abs(fall / 1e4 - 1) < 1e-6)


@PETROV.claim("proof of Thm 3", kind="theorem")
def scale_derivative_lacks_a_root() -> Found:
    """∂σ/∂x as printed, over autograd's, at d = 4; and the size of ∂(P ⊗ I)/∂X.

    Claim: ∂D/∂X = E diag((M∘M 1)^½)⁻¹ (I ⊗ 1ᵀ) diag(vec M) G.

    Instead: The same times 1/√d; and ∂(P ⊗ I)/∂X with I of width d, not L.
    """
    x = torch.linspace(-1, 2, 4, dtype=torch.float64) ** 3
    truth = torch.func.grad(lambda y: y.std(correction=0))(x)
    m = x - x.mean()
    printed = m / m.norm()
    numbers = {
        "printed over true at d = 4": float(printed.norm() / truth.norm()),
        "entries of ∂(P ⊗ I_L)/∂X rows at L = 3, d = 4": float((3 * 3) ** 2),
        "entries it must have": float((3 * 4) ** 2),
    }
    parts = {"as printed": two((printed - truth)[None]) < 1e-12}
    ours = two((printed / math.sqrt(4) - truth)[None]) < 1e-12
    return judged(parts, numbers, instead=ours)


@PETROV.claim("appendix, ‖ξ_21‖", kind="definition")
def mixed_block_does_not_vanish_with_w2() -> Found:
    """‖ξ_21‖ at W_2 = 0, where the bound is 0.

    Claim: ‖∂²S/∂W_2∂W_1‖ ≤ √d_ff‖W_2‖.

    Instead: ∂²⟨g, S⟩/∂W_1∂W_2 = max over units of ‖Yᵀdiag(D1_k)G‖ ≤ ‖Y‖‖G‖.
    """
    y = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    w_1 = torch.eye(4, 5, dtype=torch.float64)
    net = FeedForwardCurvature(
        w_in_DM=w_1, w_out_MO=torch.zeros(5, 4).double(), activation="relu"
    )
    cotangents = torch.eye(12, dtype=torch.float64).reshape(12, 3, 4)
    whole = torch.cat(
        [feedforward_hessian(net, y, g).dense()[12:32, 32:] for g in cotangents]
    )
    numbers = {"claimed at W_2 = 0": 0.0, "norm": two(whole)}
    return judged({"it vanishes with W_2": two(whole) < 1e-12}, numbers)


@PETROV.claim("Thm 5", kind="theorem")
def blocks_are_not_each_others_equals() -> Found:
    """Shapes of the unfolded second derivatives (n·d·p_i × p_j) in both orders.

    Claim: Second derivatives by W_i, W_j and by W_j, W_i are the same matrix.

    Instead: Contracted with a cotangent they are transposes of each other.
    """
    outputs, w_1, w_2 = 3 * 4, 4 * 5, 5 * 4 + 1
    shapes = (outputs * w_1, w_2), (outputs * w_2, w_1)
    numbers = {
        "rows of (i, j)": float(shapes[0][0]),
        "rows of (j, i)": float(shapes[1][0]),
    }
    return judged({"they have one shape": shapes[0] == shapes[1]}, numbers)


@PETROV.claim("§ experiments, against Lemma 1", kind="lemma")
def activation_of_the_experiments_bends() -> Found:
    """Norm of the (W_1, W_1) block of one random net, with ReLU and with GELU.

    Claim: Formulas derived for ReLU describe the networks measured.

    Instead: ξ_11 = Σ_i y_iy_iᵀ·n_ik·φ''(u_ik) per hidden unit.
    """
    rng = torch.Generator().manual_seed(0)
    y, w_1, w_2, g = (
        torch.randn(4, 4, generator=rng, dtype=torch.float64) for _ in range(4)
    )
    norms = {
        name: feedforward_norms(
            FeedForwardCurvature(w_in_DM=w_1, w_out_MO=w_2, activation=name), y, g
        )
        for name in ("relu", "gelu")
    }
    numbers = {
        "norm of (W_1, W_1) with ReLU": norms["relu"]["in_in"],
        "norm of (W_1, W_1) with GELU": norms["gelu"]["in_in"],
    }
    parts = {"(W_1, W_1) vanishes with GELU too": norms["gelu"]["in_in"] < 1e-12}
    return judged(parts, numbers)


def _sharp_block() -> petrov.PetrovBlock:
    layer = sharp_layer(value_scale=1e4)
    D = layer.x_LD.shape[1]
    y = layer_norm(layer.x_LD + layer.output)
    none = torch.zeros(D, 1, dtype=torch.float64)
    at_minimum = petrov.PetrovLayer(
        x_LD=layer.x_LD,
        w_q_DE=layer.w_q_DE,
        w_k_DE=layer.w_k_DE,
        w_v_DD=layer.w_v_DD,
        target_LD=layer_norm(y),
    )
    return petrov.PetrovBlock(attention=at_minimum, w_1_DM=none, w_2_MD=none.mT)


def _ours(block: petrov.PetrovBlock) -> float:
    layer = block.attention
    eye = torch.eye(layer.x_LD.shape[1], dtype=torch.float64)
    held = PostNormBlock(
        heads=Heads(
            w_q_HDE=layer.w_q_DE[None],
            w_k_GDE=layer.w_k_DE[None],
            w_v_GDF=layer.w_v_DD[None],
            w_o_HFD=eye[None],
        ),
        net=FeedForwardCurvature(
            w_in_DM=block.w_1_DM, w_out_MO=block.w_2_MD, activation="relu"
        ),
        gain_1_D=torch.ones_like(eye[0]),
        gain_2_D=torch.ones_like(eye[0]),
        shift_1_D=torch.zeros_like(eye[0]),
        eps=0.0,
    )
    curvature = 2 / layer.x_LD.numel()
    return block_curvature_bound(
        held, layer.x_LD, torch.zeros_like(layer.x_LD), loss_curvature=curvature
    )


@PETROV.claim("Thm 7", kind="theorem")
def taylor_needs_a_remainder() -> Found:
    """Theorem 7 on ℓ₁ = 0 and ℓ₂ = w⁴ around the minimiser 0 of both, at w = 1.

    Claim: |L_{k+1}(w) − L_k(w)| ≤ 2Λ/(k+1) + M‖w − w*‖²/(k+1).

    Instead: Around any w0: [|ℓ_{k+1} − L_k| + ‖g_{k+1} − g‖‖δ‖ + ½‖H_{k+1} − H‖‖δ‖² +
    (ρ/3)‖δ‖³]/(k+1), ρ a Lipschitz constant of the Hessians; and Λ, not 2Λ.
    """

    def difference(w: Tensor) -> Tensor:
        return (0 + w**4) / 2 - 0 * w

    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    bend = torch.autograd.functional.hessian(lambda w: (w**4).sum(), zero)
    values_at_minimum = float(zero**4)
    bound = (2 * values_at_minimum + float(bend.abs().max())) / 2
    truth = float(difference(one))
    numbers = {"bound at k = 1, w = 1": bound, "difference": truth}
    return judged({"the difference is within it": truth <= bound}, numbers)


@PETROV.claim("Fig 6", kind="experiment")
def slope_of_running_means() -> Found:
    """The slope of |L_{k+1} − L_k| for means of uniform random numbers.

    Claim: A slope of −1 of |L_{k+1} − L_k| confirms the curvature bound.

    Instead: E(L_{k+1} − L_k)² = Var ℓ/(k(k+1)): −1 is a property of running means; look
    away from w*, and beside the null.

    Practice: A slope of −1 over samples says nothing about curvature.
    """
    rng = torch.Generator().manual_seed(0)
    draws, k = 64, torch.arange(1000, 100_000, dtype=torch.float64)
    slopes = []
    for _ in range(draws):
        losses = torch.rand(100_000, generator=rng, dtype=torch.float64)
        means = losses.cumsum(0) / torch.arange(1, 100_001, dtype=torch.float64)
        steps = means.diff().abs()[999:].clamp_min(1e-300)
        slopes.append(_slope(k[: len(steps)].log(), steps.log()))
    mean = sum(slopes) / draws
    spread = math.sqrt(sum((s - mean) ** 2 for s in slopes) / (draws - 1) / draws)
    numbers = {"slope of uniform random numbers": mean, "standard error": spread}
    parts = {
        "numbers without curvature have another": abs(mean + 1) > 3 * spread + 0.01
    }
    return judged(parts, numbers)


@PETROV.claim("Fig 12, Assumption 1", kind="experiment")
def gradient_sums_stall_in_bfloat16() -> Found:
    """The mean of 4096 equal numbers from a running sum in bf16, as Fig 12 sums.

    Claim: The norm of the mean gradient falls as samples are added.

    Rule: Undecided where a bf16 sum alone would make a constant's mean fall by half:
    the figure then cannot tell a fall of the gradient from that of its sum.

    Instead: Undecided, because the figure's sums are in bf16. Sum in float32 or wider:
    a bf16 sum of one constant stalls below 2⁹ of it, and its mean decays as 1/k by
    arithmetic alone.
    """
    count, value = 4096, torch.tensor(0.0800, dtype=torch.bfloat16)
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(count):
        total = total + value
    mean = float(total) / count
    explained = mean < 0.5 * float(value)
    return judged_pattern(
        {"not the format's": None if explained else True},
        {
            "true mean": float(value),
            "mean of 4096 from a bf16 sum": mean,
            "where the sum stalls": float(total),
        },
    )


def _slope(x: Tensor, y: Tensor) -> float:
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())
