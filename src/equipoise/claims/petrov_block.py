"""Petrov et al. (2025): what is claimed of norms, feed-forward nets and blocks."""

import math

import torch
from torch import Tensor

from equipoise.claims.petrov_attention import sharp_layer
from equipoise.claims.verdict import PETROV, Found
from equipoise.theory.curvature.block_bounds import PostNormBlock, block_curvature_bound
from equipoise.theory.curvature.feedforward import (
    FeedForward,
    feedforward_hessian,
    feedforward_norms,
)
from equipoise.theory.curvature.norm import norm_curvature_unfolded
from equipoise.theory.curvature.petrov import (
    PetrovBlock,
    PetrovLayer,
    layer_norm,
    petrov_block_bound,
    two,
)
from equipoise.theory.lipschitz.heads import Heads


@PETROV.claim("Thm 6")
def block_bound_is_exceeded() -> Found:
    """Theorem 6 at zero loss, with true LayerNorm norms and ‖∂F/∂W_Q‖ as printed.

    Claim: The Hessian of a block is at most 5·max over pairs of weights.

    Instead: Sum the nodes: ‖∇²⟨λ, φ⟩‖·‖J_a‖‖J_b‖ into a matrix of norms
    (block_curvature_bound).
    """
    block = _sharp_block()
    layer = block.attention

    def output(w_k: Tensor) -> Tensor:
        moved = PetrovLayer(
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
    claimed, ours = petrov_block_bound(block), _ours(block)
    return "fails" if truth > claimed else "holds", {
        "claimed": claimed,
        "norm of the KK block": truth,
        "ours": ours,
    }


@PETROV.claim("last appendix, norm lemma")
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

    return "fails" if truth > first(norm) else "holds", {
        "claimed": first(norm),
        "norm of the Jacobian": truth,
        "claimed with the standard deviation": first(std),
        "norm of the second derivative": whole,
    }


@PETROV.claim("last appendix, norm lemma")
def norm_lemma_has_a_term_of_wrong_degree() -> Found:
    """The middle term of the lemma's ‖H‖ has degree −1 in x, LayerNorm's degree −2.

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
    return "fails" if middle[0] / middle[1] < 1e3 < small / large else "holds", {
        "fall of the second derivative from c = 1 to 100": small / large,
        "fall of the middle term": middle[0] / middle[1],
    }


@PETROV.claim("proof of Thm 3")
def scale_derivative_lacks_a_root() -> Found:
    """The proof of Theorem 3 prints ∂σ/∂x without 1/√d.

    Claim: ∂D/∂X = E diag((M∘M 1)^½)⁻¹ (I ⊗ 1ᵀ) diag(vec M) G.

    Instead: The same times 1/√d; and ∂(P ⊗ I)/∂X with I of width d, not L.
    """
    x = torch.linspace(-1, 2, 4, dtype=torch.float64) ** 3
    truth = torch.func.grad(lambda y: y.std(correction=0))(x)
    m = x - x.mean()
    printed = m / m.norm()
    return "corrected" if two((printed - 2 * truth)[None]) < 1e-12 else "fails", {
        "printed over true at d = 4": float(printed.norm() / truth.norm()),
        "entries of ∂(P ⊗ I_L)/∂X rows at L = 3, d = 4": float((3 * 3) ** 2),
        "entries it must have": float((3 * 4) ** 2),
    }


@PETROV.claim("appendix, ‖ξ_21‖")
def mixed_block_does_not_vanish_with_w2() -> Found:
    """‖ξ_21‖ ≤ √d_ff‖W_2‖ at W_2 = 0.

    Claim: ‖∂²S/∂W_2∂W_1‖ ≤ √d_ff‖W_2‖.

    Instead: ∂²⟨g, S⟩/∂W_1∂W_2 = max over units of ‖Yᵀdiag(D1_k)G‖ ≤ ‖Y‖‖G‖.
    """
    y = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    w_1 = torch.eye(4, 5, dtype=torch.float64)
    net = FeedForward(
        w_in_DM=w_1, w_out_MO=torch.zeros(5, 4).double(), activation="relu"
    )
    cotangents = torch.eye(12, dtype=torch.float64).reshape(12, 3, 4)
    whole = torch.cat(
        [feedforward_hessian(net, y, g).dense()[12:32, 32:] for g in cotangents]
    )
    return "fails" if two(whole) > 0 else "holds", {
        "claimed at W_2 = 0": 0.0,
        "norm": two(whole),
    }


@PETROV.claim("Thm 5")
def blocks_are_not_each_others_equals() -> Found:
    """“H^(i,j) = H^(j,i)” for unfolded second derivatives (n·d·p_i × p_j).

    Claim: Second derivatives by W_i, W_j and by W_j, W_i are the same matrix.

    Instead: Contracted with a cotangent they are transposes of each other.
    """
    outputs, w_1, w_2 = 3 * 4, 4 * 5, 5 * 4 + 1
    shapes = (outputs * w_1, w_2), (outputs * w_2, w_1)
    return "fails" if shapes[0] != shapes[1] else "holds", {
        "rows of (i, j)": float(shapes[0][0]),
        "rows of (j, i)": float(shapes[1][0]),
    }


@PETROV.claim("§ experiments, against Lemma 1")
def activation_of_the_experiments_bends() -> Found:
    """The theory has ReLU (∂²S/∂W_1² = 0), the experiments GELU.

    Claim: Formulas derived for ReLU describe the networks measured.

    Instead: ξ_11 = Σ_i y_iy_iᵀ·n_ik·φ''(u_ik) per hidden unit.
    """
    rng = torch.Generator().manual_seed(0)
    y, w_1, w_2, g = (
        torch.randn(4, 4, generator=rng, dtype=torch.float64) for _ in range(4)
    )
    norms = {
        name: feedforward_norms(
            FeedForward(w_in_DM=w_1, w_out_MO=w_2, activation=name), y, g
        )
        for name in ("relu", "gelu")
    }
    return "fails" if norms["gelu"]["in_in"] > 0 else "holds", {
        "norm of (W_1, W_1) with ReLU": norms["relu"]["in_in"],
        "norm of (W_1, W_1) with GELU": norms["gelu"]["in_in"],
    }


def _sharp_block() -> PetrovBlock:
    layer = sharp_layer(value_scale=1e4)
    D = layer.x_LD.shape[1]
    y = layer_norm(layer.x_LD + layer.output)
    none = torch.zeros(D, 1, dtype=torch.float64)
    at_minimum = PetrovLayer(
        x_LD=layer.x_LD,
        w_q_DE=layer.w_q_DE,
        w_k_DE=layer.w_k_DE,
        w_v_DD=layer.w_v_DD,
        target_LD=layer_norm(y),
    )
    return PetrovBlock(attention=at_minimum, w_1_DM=none, w_2_MD=none.mT)


def _ours(block: PetrovBlock) -> float:
    layer = block.attention
    eye = torch.eye(layer.x_LD.shape[1], dtype=torch.float64)
    held = PostNormBlock(
        heads=Heads(
            w_q_HDE=layer.w_q_DE[None],
            w_k_GDE=layer.w_k_DE[None],
            w_v_GDF=layer.w_v_DD[None],
            w_o_HFD=eye[None],
        ),
        net=FeedForward(w_in_DM=block.w_1_DM, w_out_MO=block.w_2_MD, activation="relu"),
        gain_1_D=torch.ones_like(eye[0]),
        gain_2_D=torch.ones_like(eye[0]),
        shift_1_D=torch.zeros_like(eye[0]),
        eps=0.0,
    )
    curvature = 2 / layer.x_LD.numel()
    return block_curvature_bound(
        held, layer.x_LD, torch.zeros_like(layer.x_LD), loss_curvature=curvature
    )
