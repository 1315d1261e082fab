"""What the watcher's sampled bound costs: 64 queries of a GPT-2-large attention layer.

CPU seconds in one process, in turns, against the forward pass of the same layer; and
the memory of one head at 8192 tokens.
"""

import resource
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.table import cpu_seconds, publish
from equipoise.theory.lipschitz.forward import attend
from equipoise.theory.lipschitz.heads import Heads, rotary
from equipoise.theory.lipschitz.local import local_paths

QUERIES = 64


def gaussian(heads: int, head_width: int) -> Heads:
    H, E, D = heads, head_width, heads * head_width
    torch.manual_seed(0)
    w_q, w_k, w_v = D**-0.5 * torch.randn(3, H, D, E)
    w_o = D**-0.5 * torch.randn(H, E, D)
    return Heads(w_q_HDE=w_q, w_k_GDE=w_k, w_v_GDF=w_v, w_o_HFD=w_o, causal=True)


def sampled(heads: Heads, x_KD: Tensor) -> Tensor:
    queries = torch.linspace(0, len(x_KD) - 1, QUERIES).long()
    with torch.no_grad():
        return local_paths(attend(heads, x_KD, queries=queries)).total_HQ


def forward(heads: Heads, x_KD: Tensor) -> Tensor:
    """Return the layer's output, its projections taken as the one matrix they are."""
    H, D, E = heads.w_q_HDE.shape
    with torch.no_grad():
        q, k, v = (
            (x_KD @ w.permute(1, 0, 2).reshape(D, -1)).view(-1, H, E).transpose(0, 1)
            for w in heads.weights[:3]
        )
        o_HKE = F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True
        )
        return o_HKE[0].transpose(0, 1).flatten(1) @ heads.w_o_HFD.flatten(0, 1)


def peak_mib(heads: Heads, length: int) -> float:
    """Return how much the process's peak rose: call before anything large."""
    x_KD = torch.randn(length, heads.w_q_HDE.shape[1])
    sampled(heads, x_KD[:64])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sampled(heads, x_KD)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    torch.set_num_threads(1)
    one = gaussian(1, 64)
    turned = replace(one, rotary=rotary(8192, 64))
    memory = {"plain": peak_mib(one, 8192), "rope": peak_mib(turned, 8192)}
    rows = []
    for H, E, K in ((4, 16, 128), (4, 32, 256), (20, 64, 1024)):
        heads, x_KD = gaussian(H, E), torch.randn(K, H * E)
        rotating = replace(heads, rotary=rotary(K, E))
        base, plain, rope = cpu_seconds(
            lambda h=heads, x=x_KD: forward(h, x),
            lambda h=heads, x=x_KD: sampled(h, x),
            lambda h=rotating, x=x_KD: sampled(h, x),
            repeats=5,
        )
        row = {"heads": H, "width": E, "keys": K, "forward s": base[0]}
        row |= {"sampled s": plain[0], "sampled rope s": rope[0]}
        rows.append(row | {"ratio": plain[0] / base[0], "rope": rope[0] / base[0]})
    publish("lipschitz_sampled", rows, queries=QUERIES, peak_mib=memory)


if __name__ == "__main__":
    main()
