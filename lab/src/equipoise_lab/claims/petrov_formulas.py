"""Petrov et al. (2025): printed Jacobians and Hessians, put beside autograd.

Row-major vectorisation and Kronecker products as in the paper, at sizes where the whole
matrices can be formed. Every reference is autograd: no formula in common.

Axes, in this file:  L token · D model width · E key width · M hidden width.
"""

import math

import torch
from torch import Tensor
from torch.autograd.functional import hessian
from torch.func import jacfwd, jacrev

from equipoise_lab.claims.petrov_attention import sharp_layer
from equipoise_lab.claims.result import PETROV, Found, judged
from equipoise_lab.theory.curvature.petrov import (
    PetrovLayer,
    layer_norm,
    petrov_attention_blocks,
)

EXACT = 1e-10
"""Float64 sums of a few hundred terms of order one; a wrong factor is of order one."""


def _eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def kron(a: Tensor, b: Tensor) -> Tensor:
    """Return a ⊗ b; ``torch.kron`` refuses transposed matrices."""
    return torch.kron(a.contiguous(), b.contiguous())


def _normal(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def _commute(rows: int, columns: int) -> Tensor:
    """Return K with K·vec(A) = vec(Aᵀ) for a rows × columns matrix."""
    order = torch.arange(rows * columns).reshape(rows, columns).mT.reshape(-1)
    return _eye(rows * columns)[order]


def _off(printed: Tensor, truth: Tensor) -> float:
    return float((printed.reshape(truth.shape) - truth).abs().max() / truth.abs().max())


def _as_printed(error: float) -> Found:
    return judged({"as printed": error < EXACT}, {"largest relative error": error})


@PETROV.claim("Thm 2", kind="theorem")
def layer_norm_jacobian() -> Found:
    """The Jacobian of LayerNorm as printed, on three rows of five.

    Claim: ∂LN/∂X = (P ⊗ I)G + (I ⊗ Mᵀ)·∂P/∂X, ∂P/∂X = d^(−½)(−D⁻¹ ⊗ D⁻ᵀ)E
    diag((M∘M·1)^½)⁻¹(I ⊗ 1ᵀ)diag(vec M)G.

    Instead: As printed. Row by row it is (C − x̂x̂ᵀ/n)/s: n² numbers instead of (Ln)².
    """
    x = _normal(3, 5)
    L, d = x.shape
    P, M, G = _norm_parts(x)
    printed = kron(P, _eye(d)) @ G + kron(_eye(L), M.mT) @ _scale_slope(x)
    error = _off(printed, jacrev(layer_norm)(x).reshape(L * d, L * d))
    return _as_printed(error)


def _norm_parts(x_LD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return P = diag(σ)⁻¹, the centred rows M, and G = ∂M/∂X."""
    L, d = x_LD.shape
    M = x_LD - x_LD.mean(-1, keepdim=True)
    P = torch.diag(1 / M.square().mean(-1).sqrt())
    ones = torch.ones(d, d, dtype=torch.float64)
    return P, M, _eye(L * d) - kron(_eye(L), ones) / d


def _scale_slope(x_LD: Tensor) -> Tensor:
    """Return ∂P/∂X as Theorem 2 prints it."""
    L, d = x_LD.shape
    P, M, G = _norm_parts(x_LD)
    E = torch.stack([kron(e, e) for e in _eye(L)], -1)
    length = torch.diag(1 / M.square().sum(-1).sqrt())
    row = kron(_eye(L), torch.ones(1, d, dtype=torch.float64))
    inner = E @ length @ row @ torch.diag(M.reshape(-1)) @ G
    return -kron(P, P.mT) @ inner / math.sqrt(d)


@PETROV.claim("Thm 3", kind="theorem")
def layer_norm_hessian() -> Found:
    """Theorem 3's three terms with exact ingredients, on two rows of four.

    Claim: ∂²LN/∂X² = (I ⊗ Gᵀ)∂(P ⊗ I)/∂X + ((I ⊗ Mᵀ) ⊗ I)∂²P/∂X² + (I ⊗
    (∂P/∂X)ᵀ)∂(I ⊗ Mᵀ)/∂X.

    Instead: The statement holds; two ingredients printed in its proof do not (see
    ``scale_derivative_lacks_a_root``). Contracted: −(x̂rᵀ + rx̂ᵀ + qJ)/(ns).
    """
    x = _normal(2, 4)
    L, d = x.shape
    size = L * d
    _, M, G = _norm_parts(x)
    slope = _scale_slope(x)

    def moved(part: int) -> Tensor:
        def at(z: Tensor) -> Tensor:
            P, M, _ = _norm_parts(z)
            return (kron(P, _eye(d)), _scale_slope(z), kron(_eye(L), M.mT))[part]

        found: Tensor = jacfwd(at)(x)
        return found.reshape(-1, size)

    printed = (
        kron(_eye(size), G.mT) @ moved(0)
        + kron(kron(_eye(L), M.mT), _eye(size)) @ moved(1)
        + kron(_eye(size), slope.mT) @ moved(2)
    )
    truth = jacfwd(jacrev(layer_norm))(x).reshape(size * size, size)
    return _as_printed(_off(printed, truth))


@PETROV.claim("Lemma 1", kind="lemma")
def relu_is_flat() -> Found:
    """The second derivative of ReLU and of GELU where no input is zero.

    Claim: ReLU's derivative is the indicator, its second derivative zero almost
    everywhere.

    Instead: As stated; GELU and SiLU of real models bend (``sup|act''|`` 0.798, 0.5).
    """
    x = _normal(64)
    slope = jacrev(lambda z: z.relu().sum())(x) - (x > 0).double()
    bend = {
        name: float(hessian(lambda z, f=f: f(z).sum(), x).abs().max())
        for name, f in (("ReLU", torch.relu), ("GELU", torch.nn.functional.gelu))
    }
    flat = float(slope.abs().max()) == 0 and bend["ReLU"] == 0
    numbers = {f"largest second derivative of {n}": value for n, value in bend.items()}
    return judged({"ReLU": flat}, numbers)


@PETROV.claim("appendix, ξ_12 and ξ_21", kind="definition")
def mixed_blocks_are_exchanged() -> Found:
    """What is printed as ξ_12, beside both orders of differentiation.

    Claim: ∂(∂S/∂W_1)/∂W_2 = (I ⊗ K ⊗ I)(I ⊗ vec I)D_σ(Y ⊗ I).

    Instead: That is ∂(∂S/∂W_2)/∂W_1: the two names are exchanged.
    """
    y, w_1, w_2 = _normal(3, 2), _normal(2, 4, seed=1), _normal(4, 2, seed=2)
    (L, d), m = y.shape, w_1.shape[1]
    active = torch.diag(((y @ w_1) > 0).double().reshape(-1))
    spread = kron(kron(_eye(L), _commute(m, d)), _eye(d))
    vec = _eye(d).reshape(-1, 1)
    printed = spread @ kron(_eye(L * m), vec) @ active @ kron(y, _eye(m))

    def out(a: Tensor, b: Tensor) -> Tensor:
        return (y @ a).relu() @ b

    first = jacfwd(jacrev(out, argnums=1), argnums=0)(w_1, w_2)
    second = jacfwd(jacrev(out, argnums=0), argnums=1)(w_1, w_2)
    of_21, of_12 = (_off(printed, t.reshape(-1, d * m)) for t in (first, second))
    numbers = {"error as ξ_12, as printed": of_12, "error as ξ_21": of_21}
    return judged({"it is ξ_12": of_12 < EXACT}, numbers, instead=of_21 < EXACT)


@PETROV.claim("attention blocks VV, QQ, VQ, QK", kind="theorem")
def attention_blocks() -> Found:
    """The published outer and functional parts of four blocks, against autograd.

    Claim: The Hessian of attention under squared error, block by block.

    Instead: The four printed blocks are right, with S of d³ rows where d² is printed.
    KK and VK are not given; the moment form has all six, for any loss and mask.

    Practice: The printed Hessian blocks of attention can be used; KK and VK have to
    be added.
    """
    layer = PetrovLayer(
        x_LD=_normal(3, 2),
        w_q_DE=_normal(2, 2, seed=1),
        w_k_DE=_normal(2, 2, seed=2),
        w_v_DD=_normal(2, 2, seed=3),
        target_LD=_normal(3, 2, seed=4),
    )
    printed = _printed_blocks(layer)
    errors = {name: _off(block, _truth(layer, name)) for name, block in printed.items()}
    missing = {"VV", "QQ", "VQ", "QK", "KK", "VK"} - printed.keys()
    numbers = {f"{k}: relative error": v for k, v in errors.items()}
    numbers["blocks that are not given"] = float(len(missing))
    parts = {name: error < EXACT for name, error in errors.items()}
    return judged(parts, numbers, caveat=bool(missing))


def _printed_blocks(layer: PetrovLayer) -> dict[str, Tensor]:
    x, q, k, v = layer.x_LD, layer.w_q_DE, layer.w_k_DE, layer.w_v_DD
    (L, d), e = x.shape, q.shape[1]
    c, one = 2 / (L * d), _eye(d)

    def rows(t: Tensor) -> Tensor:
        return t.reshape(L, L).softmax(-1).reshape(-1)

    t = (x @ q @ k.mT @ x.mT / math.sqrt(e)).reshape(-1)
    mean = rows(t).reshape(L, L) @ x
    bend = jacfwd(jacrev(rows))(t).reshape(L**4, L**2)
    Z1 = kron(_eye(L), x.mT) @ jacrev(rows)(t) @ kron(x, x)
    Z2 = kron(kron(kron(_eye(L), x.mT), x.mT), x.mT) @ bend @ kron(x, x)
    S = kron(one, _commute(d, d)) @ kron(one.reshape(-1, 1), one)
    delta = (layer.output - layer.target_LD).reshape(1, -1)
    by_q, by_k = kron(one, k), kron(q, one) @ _commute(d, e)
    values, score = kron(_eye(L), v @ v.mT), c / math.sqrt(e)
    bent = kron(kron(kron(_eye(L), v.mT), one), k.mT) @ Z2
    stripe = kron(delta, one) @ kron(kron(_eye(L), v.mT), one) @ kron(Z1, one) @ S
    return {
        "VV": c * kron(mean.mT @ mean, one),
        "QQ": c / e * by_q.mT @ Z1.mT @ values @ Z1 @ by_q
        + c / e * kron(delta, _eye(d * e)) @ bent @ by_q,
        "VQ": score * kron(mean.mT, v.mT) @ Z1 @ by_q
        + score * kron(delta, _eye(d * d)) @ kron(_eye(L), S) @ Z1 @ by_q,
        "QK": c / e * by_q.mT @ Z1.mT @ values @ Z1 @ by_k
        + c / e * kron(delta, _eye(d * e)) @ bent @ by_k
        + score * kron(stripe, _eye(e)),
    }


def _truth(layer: PetrovLayer, pair: str) -> Tensor:
    names = {"Q": "w_q_DE", "K": "w_k_DE", "V": "w_v_DD"}
    held = {n: getattr(layer, n) for n in (*names.values(), "x_LD", "target_LD")}

    def loss(a: Tensor, b: Tensor) -> Tensor:
        moved = {**held, names[pair[1]]: b, names[pair[0]]: a}
        return (PetrovLayer(**moved).output - layer.target_LD).square().mean()

    first, second = (held[names[letter]] for letter in pair)
    found: Tensor
    if pair[0] == pair[1]:
        found = hessian(lambda w: loss(w, w), first)
    else:
        found = hessian(loss, (first, second))[0][1]
    return found.reshape(first.numel(), second.numel())


@PETROV.claim("Thm 4", kind="theorem")
def block_chain_rule() -> Found:
    """The second derivative of LN(Y + relu(YW_1)W_2) by the printed chain rule.

    Claim: ∂²Z/∂W_i∂W_j = (J_Z ⊗ I)ξ_ij + (I ⊗ B_iᵀ)H_Z B_j.

    Instead: As stated, for feed-forward pairs of any activation. The exact additive
    form over all nodes is ``equipoise curvature``'s attribution.
    """
    y, w_1, w_2 = _normal(2, 3), _normal(3, 2, seed=1), _normal(2, 3, seed=2)
    outputs, n = y.numel(), w_1.numel()

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return y + (y @ a).relu() @ b

    at = inner(w_1, w_2)
    J = jacrev(layer_norm)(at).reshape(outputs, outputs)
    H = jacfwd(jacrev(layer_norm))(at).reshape(outputs * outputs, outputs)
    B_1, B_2 = (jacrev(inner, argnums=i)(w_1, w_2).reshape(outputs, n) for i in (0, 1))
    xi = jacfwd(jacrev(inner, argnums=0), argnums=1)(w_1, w_2).reshape(outputs * n, n)
    printed = kron(J, _eye(n)) @ xi + kron(_eye(outputs), B_1.mT) @ H @ B_2

    def whole(a: Tensor, b: Tensor) -> Tensor:
        return layer_norm(inner(a, b))

    truth = jacfwd(jacrev(whole, argnums=0), argnums=1)(w_1, w_2)
    return _as_printed(_off(printed, truth.reshape(outputs * n, n)))


@PETROV.claim("ours, on Thm 1: main text against appendix", kind="theorem")
def constants_disagree() -> Found:
    """One entry of Theorem 1 with the constants of the main text and of the appendix.

    Claim: The main text and the appendix state one Value–Query entry of the bound.

    Instead: Two values for one bound: neither can be quoted. Both rest on ‖∂A/∂T‖ ≤
    1/L, which is false; use the bound from the moments of each query.
    """
    layer = sharp_layer(value_scale=1.0)
    (L, D, E), (x, _, k, v) = layer.sizes, layer.norms
    text = petrov_attention_blocks(layer)["VQ"]
    off = math.sqrt(min(L, D)) * (L * x * v + float(layer.target_LD.norm()))
    outer = 2 * v * k * x**4 / (L * D * math.sqrt(D * E))
    appendix = outer + 2 * off * k * x**3 / (L**2 * math.sqrt(D * E))
    numbers = {"main text": text, "appendix": appendix}
    return judged({"the two agree": abs(text / appendix - 1) < 0.01}, numbers)


@PETROV.claim("Table 1, Figs 3–4", kind="experiment")
def model_sizes() -> Found:
    """Parameters of the two vision transformers, counted from the described layers.

    Claim: The Hessians drawn are of 3,552 weights, 768 of them of attention.

    Instead: 3,552 are all parameters but ten biases of the head and 80 others: the
    norms' shifts are in it. The model has 3,642, the larger one 1.60 million.
    """
    small = _vit(width=16, hidden=64, blocks=1, patch=16, classes=10)
    large = _vit(width=128, hidden=512, blocks=8, patch=48, classes=100)
    biases = 16 + 4 * 16 + 10
    drawn, attention = small - biases, 3 * 16 * 16
    numbers = {
        "parameters, MNIST": float(small),
        "without biases of linear maps": float(drawn),
        "weights of Q, K and V": float(attention),
        "parameters, CIFAR-100": float(large),
    }
    parts = {"3,552": drawn == 3552, "768": attention == 768}
    return judged(parts, numbers)


def _vit(*, width: int, hidden: int, blocks: int, patch: int, classes: int) -> int:
    """Count patch map, Q, K, V, O with biases, two plain maps, two norms, head."""
    block = 4 * (width * width + width) + 2 * width * hidden + 4 * width
    head = width * classes + classes
    return patch * width + width + blocks * block + head
