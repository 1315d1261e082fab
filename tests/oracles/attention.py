"""Every attention score of a model, in float64, by another road than the interceptor.

A float64 copy of the model runs eagerly with ``softmax`` replaced by one that writes
down what it is given; fused attention is replaced by a dense one. θ tries every subset.

Axes, in this file:  B batch · H head · Q query · K key · S subset.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN = -9e3


@contextmanager
def written_down(heads: int) -> Iterator[list[Tensor]]:
    """Collect the scores of every softmax that attention could have called."""
    scores: list[Tensor] = []
    plain, multi_head = Tensor.softmax, F.multi_head_attention_forward

    def softmax(x: Tensor, dim: int = -1, *_: Any, **kw: Any) -> Tensor:
        if x.ndim > 2:
            whole = x.detach().transpose(dim, -1)
            folded = whole.ndim == 3
            scores.append(
                whole.reshape(-1, heads, *whole.shape[1:]) if folded else whole
            )
        return plain(x, dim, kw.get("dtype"))

    def log_softmax(x: Tensor, dim: int = -1, *_: Any, **kw: Any) -> Tensor:
        return softmax(x, dim, **kw).log()

    def dense(q: Tensor, k: Tensor, v: Tensor, *given: Any, **kw: Any) -> Tensor:
        return _dense(softmax, (q, k, v), *given, **kw)

    def with_weights(*given: Any, **kw: Any) -> Any:
        return multi_head(*given, **{**kw, "need_weights": True})

    with mock.patch.multiple(
        F,
        softmax=softmax,
        log_softmax=log_softmax,
        scaled_dot_product_attention=dense,
        multi_head_attention_forward=with_weights,
    ):
        with (
            mock.patch.object(torch, "softmax", softmax),
            mock.patch.object(Tensor, "softmax", softmax),
        ):
            yield scores


def _dense(
    softmax: Callable[..., Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    q, k, v = qkv
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    z = torch.einsum("...qd,...kd->...qk", q, k)
    z = z / q.shape[-1] ** 0.5 if scale is None else z * scale
    if is_causal:
        z = torch.where(torch.ones_like(z[0, 0]).tril() > 0, z, -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        z = torch.where(attn_mask, z, -torch.inf)
    elif attn_mask is not None:
        z = z + attn_mask
    return torch.einsum("...qk,...kd->...qd", softmax(z, -1), v)


def scores(model: nn.Module, batch: dict[str, Any], *, heads: int) -> list[Tensor]:
    """Return the scores of each attention call, hidden keys at -inf."""
    doubled = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in batch.items()
    }
    twin = copy.deepcopy(model).double()
    with written_down(heads) as found:
        twin(**doubled)
    return [torch.where(z > HIDDEN, z.double(), -torch.inf) for z in found]


@dataclass(frozen=True)
class Rows:
    """What each row of attention should read, over the rows that count."""

    theta: Tensor
    entropy: Tensor
    max_logit: Tensor
    counted: Tensor


def rows(z_BHQK: Tensor, real_BQ: Tensor | None) -> Rows:
    """Return the row quantities of dense scores; uncounted rows are NaN."""
    visible_BHQ = (z_BHQK > -torch.inf).sum(-1)
    counted = visible_BHQ >= 2
    if real_BQ is not None:
        counted = counted & real_BQ[:, None]
    p = torch.softmax(torch.where(counted[..., None], z_BHQK, 0.0), -1)
    entropy = torch.special.entr(p).sum(-1)
    nan = float("nan")
    values = (theta(p), entropy, z_BHQK.amax(-1))
    return Rows(*(torch.where(counted, v, nan) for v in values), counted)


def theta(p_K: Tensor) -> Tensor:
    """Return 4 max over all subsets of p(S) (1 - p(S)): every subset is tried."""
    K = p_K.shape[-1]
    assert K <= 12, "2^K subsets"
    subsets_SK = torch.tensor(list(itertools.product((0.0, 1.0), repeat=K - 1)))
    mass = p_K[..., 1:] @ subsets_SK.T.to(p_K.dtype)
    return (4 * mass * (1 - mass)).amax(-1)
