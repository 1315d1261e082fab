"""Layers and blocks with a squared error, and their true Hessians by autograd."""

import torch
from torch import Tensor

from equipoise.theory.lipschitz.heads import Heads
from equipoise_lab.theory.curvature.block_bounds import PostNormBlock
from equipoise_lab.theory.curvature.feedforward import FeedForwardCurvature
from equipoise_lab.theory.curvature.petrov import PetrovBlock, PetrovLayer
from lab.tests.theory.curvature_draws import Draw
from tests.oracles import curvature as oracle


def random_layer(seed: int, *, scale: float, length: int = 5) -> PetrovLayer:
    draw = Draw(seed)
    D, E = draw.number(2, 5), draw.number(1, 4)
    return PetrovLayer(
        x_LD=draw.normal(length, D, scale=scale),
        w_q_DE=draw.normal(D, E),
        w_k_DE=draw.normal(D, E),
        w_v_DD=draw.normal(D, D),
        target_LD=draw.normal(length, D),
    )


def heads_of(layer: PetrovLayer) -> Heads:
    eye = torch.eye(len(layer.w_v_DD)).to(layer.w_v_DD)
    return Heads(
        w_q_HDE=layer.w_q_DE[None],
        w_k_GDE=layer.w_k_DE[None],
        w_v_GDF=layer.w_v_DD[None],
        w_o_HFD=eye[None],
    )


def layer_output(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((x @ q) @ (x @ k).T / q.shape[1] ** 0.5).softmax(-1) @ x @ v


def layer_hessian(layer: PetrovLayer) -> Tensor:
    """Return the Hessian of the mean squared error over W_Q, W_K, W_V."""
    return oracle.whole_hessian(
        lambda q, k, v: (
            (layer_output(layer.x_LD, q, k, v) - layer.target_LD) ** 2
        ).mean(),
        (layer.w_q_DE, layer.w_k_DE, layer.w_v_DD),
    )


def random_block(seed: int, *, scale: float = 1.0) -> PetrovBlock:
    layer, draw = random_layer(seed, scale=scale), Draw(seed + 10_000)
    D, M = layer.x_LD.shape[1], draw.number(2, 5)
    if D < 3:
        return random_block(seed + 1_000, scale=scale)
    return PetrovBlock(
        attention=layer, w_1_DM=draw.normal(D, M), w_2_MD=draw.normal(M, D)
    )


def post_norm(
    block: PetrovBlock, activation: str = "relu", eps: float = 0.0
) -> PostNormBlock:
    D = block.attention.x_LD.shape[1]
    ones = torch.ones(D, dtype=torch.float64)
    return PostNormBlock(
        heads=heads_of(block.attention),
        net=FeedForwardCurvature(
            w_in_DM=block.w_1_DM, w_out_MO=block.w_2_MD, activation=activation
        ),
        gain_1_D=ones,
        gain_2_D=ones,
        shift_1_D=torch.zeros_like(ones),
        eps=eps,
    )


def block_output(
    x: Tensor, *weights: Tensor, activation: str = "relu", eps: float = 0.0
) -> Tensor:
    q, k, v, w_1, w_2 = weights
    ones = torch.ones(x.shape[1], dtype=x.dtype)
    first = x + layer_output(x, q, k, v)
    y = oracle.norm(first, ones, eps=eps, centred=True)
    second = y + oracle.ACTIVATIONS[activation](y @ w_1) @ w_2
    return oracle.norm(second, ones, eps=eps, centred=True)


def block_weights(block: PetrovBlock) -> tuple[Tensor, ...]:
    a = block.attention
    return a.w_q_DE, a.w_k_DE, a.w_v_DD, block.w_1_DM, block.w_2_MD


def block_hessian(
    block: PetrovBlock, activation: str = "relu", eps: float = 0.0
) -> Tensor:
    a = block.attention
    return oracle.whole_hessian(
        lambda *w: (
            (block_output(a.x_LD, *w, activation=activation, eps=eps) - a.target_LD)
            ** 2
        ).mean(),
        block_weights(block),
    )
