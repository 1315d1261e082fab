"""Statistics of attention rows from queries and keys, in one launch of one kernel.

Axes, in this file:  B batch · H head · G key head · Q query · n chosen query · K key ·
D width · C column.

For CUDA and ROCm; with ``TRITON_INTERPRET=1``, set before triton is imported, on a CPU.
Importing this file imports triton.
"""

import os
from typing import Any

import torch
import triton
from torch import Tensor

from equipoise.numerics.compiled import to_device
from equipoise.numerics.rows.triton_kernel import attention_rows

COLUMNS = 10
"""Those of ``statistics.row_columns``, and the logarithm of the sum of exponentials."""
BLOCK_K = 64
"""Keys of a tile, and groups that give two candidates each for the largest keys."""
BITS = 9
"""The largest key is always inside, and so many others are dealt."""
FEW = 6
"""Of so many more every subset is tried as well: as many subsets as a tile has keys."""


def columns(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    sees_4BQ: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
    chosen_n: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """Return (C, B, H, n): the columns of every row, or of the chosen queries.

    Args:
        q_BHQD, k_BGKD: bfloat16, float16 or float32, any strides, D up to 256.
        sees_4BQ: int32; the first key that each query sees and the one after the last,
            the key at its own place (ALiBi counts from there), and the first key of its
            document, whose mass is the sink.
        scale: Multiplies the scores.
        mask: Boolean (True shows) or additive, broadcastable to (B, H, Q, K); what
            ``sees_4BQ`` hides stays hidden.
        slopes: ALiBi, (H,) or (B, H): what a score loses per key of distance.
        softcap: c · tanh(score / c), before ALiBi and masks, unless 0.
        chosen_n: Which queries are read.
        block: Rows of one program, a power of 2 from 16 on; chosen if not given.
    """
    B, H, Q, D = q_BHQD.shape
    K, n = k_BGKD.shape[2], Q if chosen_n is None else len(chosen_n)
    out = q_BHQD.new_empty(COLUMNS, B, H, n, dtype=torch.float32)
    kind, given = _mask(mask, (B, H, Q, K))
    tall = slopes if slopes is None else slopes.expand(B, H)
    sees_4BQ = sees_4BQ.expand(4, B, Q)
    width = max(16, triton.next_power_of_2(D))
    rows = block or (16 if n <= 16 or width > 128 else 32)
    optional = [out if x is None else x for x in (given, tall)]
    chosen = sees_4BQ if chosen_n is None else to_device(chosen_n, q_BHQD.device)
    strides = [
        (0,) * m if x is None else x.stride() for x, m in ((given, 4), (tall, 2))
    ]
    attention_rows[(triton.cdiv(n, rows), B * H)](
        *(q_BHQD.detach(), k_BGKD.detach(), *optional, sees_4BQ, chosen, out),
        *(scale, softcap or 1.0, H, H // k_BGKD.shape[1], n, K, D),
        *(*q_BHQD.stride(), *k_BGKD.stride(), *strides[0], *strides[1]),
        *(*sees_4BQ.stride(), out.stride(0)),
        **constants(rows, width, kind),
        CAPPED=bool(softcap),
        ALIBI=slopes is not None,
        CHOSEN=chosen_n is not None,
        # The interpreter of triton 3.9 multiplies the bit patterns of bfloat16.
        WIDEN=os.environ.get("TRITON_INTERPRET") == "1",
    )
    return out


def constants(rows: int, width: int, mask: int) -> dict[str, Any]:
    """Return the sizes of one program's tiles, and which kind of mask it reads."""
    sizes = {"BQ": rows, "BK": BLOCK_K, "BD": width, "BITS": BITS, "DEALS": 1 << BITS}
    return {**sizes, "FEW": FEW, "MASK": mask}


def _mask(mask: Tensor | None, shape: tuple[int, ...]) -> tuple[int, Tensor | None]:
    """Return which kind a mask is, and itself with strides of 0 where it is alike."""
    if mask is None:
        return 0, None
    whole = mask.detach().expand(shape)
    return (1, whole.view(torch.uint8)) if mask.dtype == torch.bool else (2, whole)
