"""Models nobody declared are read all the same; what is not attention is not."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracles import attention as oracle
from tests.zoo.odd import ODD, C, H, KeysFirst
from tests.zoo.reading import capture, deviation
from tests.zoo.test_zoo import TOLERANCE

X = torch.randn(2, 7, C, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", ODD, ids=lambda k: k.__name__)
def test_an_unknown_model_is_read(kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    model = kind()
    name = "input" if isinstance(model, nn.Sequential) else "x"
    captured = capture(model, {name: X})
    assert [call.site for call in captured.calls] == ODD[kind]
    found = oracle.scores(model, {name: X}, heads=1 if kind is KeysFirst else H)
    truth = [oracle.rows(_axes(z), None) for z in found]
    for call, rows in zip(captured.calls, truth, strict=True):
        assert max(deviation(call.rows, rows).values()) < TOLERANCE


def _axes(z: Tensor) -> Tensor:
    """Return (B, H, Q, K) from the grouped five, or from (B, Q, H, K)."""
    z = z.flatten(1, 2) if z.ndim == 5 else z
    return z.transpose(1, 2) if z.shape[2] == H else z


class Router(nn.Module):
    """Softmaxes that weigh experts, a codebook and a vocabulary, never values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate, self.up = nn.Linear(C, 5), nn.Linear(C, 5 * C)
        self.codebook = nn.Parameter(torch.randn(5, C))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1) if self.kind.endswith("2") else x
        p = self.gate(flat).softmax(-1)
        experts = self.up(flat).unflatten(-1, (5, C))
        match self.kind[:-1]:
            case "einsum":
                return torch.einsum("...e,...ec->...c", p, experts)
            case "sum":
                return (p.unsqueeze(-1) * experts).sum(-2)
            case "matmul":
                return (p.unsqueeze(-2) @ experts).squeeze(-2)
            case "codebook":
                return p @ self.codebook
            case _:
                best, chosen = p.topk(2, dim=-1)
                index = chosen[..., None].expand(*chosen.shape, C)
                return (best[..., None] * experts.gather(-2, index)).sum(-2)


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("kind", ["einsum", "sum", "matmul", "codebook", "topk"])
def test_a_router_is_not_attention(kind: str, axes: int) -> None:
    assert not capture(Router(f"{kind}{axes}"), {"x": X}).calls


def test_a_vocabulary_is_not_attention() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, C)

        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(x @ self.table.weight.mT, dim=-1) @ self.table.weight

    assert not capture(Reader(), {"x": X}).calls


def test_slots_that_compete_are_named_as_unread() -> None:
    """Slot attention: softmax over queries, then a sum over keys."""

    class Slots(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p = torch.softmax(x[:, :3] @ x.mT, dim=1)
            return p @ x

    captured = capture(Slots(), {"x": X})
    assert not captured.calls
    assert captured.gaps.unread[""].code == "other_axis"


def test_overwritten_scores_are_named_as_unread() -> None:
    class Careless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = x @ x.mT
            p = z.softmax(-1)
            z.zero_()
            return p @ x

    with torch.no_grad():
        captured = capture(Careless(), {"x": X})
    assert not captured.calls
    assert captured.gaps.unread[""].code == "scores_overwritten"
