"""What looks like attention, call by call, and is not; what does not, and is."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.odd import C, D, Oddly
from tests.zoo.reading import capture, deviation

X = torch.randn(2, 7, C, generator=torch.Generator().manual_seed(3))


class Efficient(Oddly):
    """Shen's: softmax over features of q, over tokens of k."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)


class Painter(Oddly):
    """The same as diffusion models write it, tokens last, and scaled in between."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.mT.softmax(dim=-2) * D**-0.5, k.mT.softmax(dim=-1)
        context = torch.einsum("bhdn,bhen->bhde", k, v.mT)
        return torch.einsum("bhde,bhdn->bhen", context, q).mT


class Seen(Oddly):
    """What was mixed is looked at from another side before it is mixed again."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.softmax(-1), k.softmax(-2)
        context = v.mT @ k
        return q @ context.transpose(-1, -2)


@pytest.mark.parametrize("kind", [Efficient, Painter, Seen])
def test_linear_attention_is_named_and_not_read(kind: type[Oddly]) -> None:
    captured = capture(kind(), {"x": X})
    assert not captured.calls
    assert captured.gaps.unread[""].code == "product_of_softmaxes"


class BothWays(Oddly):
    """Two sequences attend to each other: both softmaxes first, then both mixes."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT
        forth, back = z.softmax(-1), z.mT.softmax(-1)
        return forth @ v + back @ q


class Unused(Oddly):
    """A softmax that is only looked at does not silence the one that mixes."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT
        self.seen = (2 * z).softmax(-1)
        return z.softmax(-1) @ v


@pytest.mark.parametrize(("kind", "calls"), [(BothWays, 2), (Unused, 1)])
def test_two_softmaxes_that_are_not_multiplied_are_read(
    kind: type[Oddly], calls: int
) -> None:
    captured = capture(kind(), {"x": X})
    assert len(captured.calls) == calls and not captured.gaps.unread


class Fused(Oddly):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class FusedOperator(Oddly):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = torch.ops.aten.scaled_dot_product_attention
        out: Tensor = attend(q, k, v, None, 0.0, True)
        return out


class Operator(Oddly):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p: Tensor = torch.ops.aten._softmax(q @ k.mT / D**0.5, -1, False)
        return p @ v


@pytest.mark.parametrize(
    ("function", "operator"), [(Fused, FusedOperator), (Oddly, Operator)]
)
def test_torchs_operators_are_read_as_its_functions(
    function: type[Oddly], operator: type[Oddly]
) -> None:
    model, twin = function(), operator()
    twin.load_state_dict(model.state_dict())
    (read,), (truth,) = (capture(m, {"x": X}).calls for m in (twin, model))
    assert max(deviation(read.rows, truth.rows).values()) == 0.0


def test_a_softmax_in_inference_mode_is_read() -> None:
    with torch.inference_mode():
        captured = capture(Oddly(), {"x": X})
    assert len(captured.calls) == 1


class SampledAttention(nn.Module):
    """Deformable: each query has values of its own; no table knows the module."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.sample = nn.Linear(C, 3), nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        values = self.sample(x).unflatten(-1, (3, C))
        return (self.weigh(x).softmax(-1)[..., None] * values).sum(-2)


def test_a_module_named_attention_without_a_seen_mix_is_listed() -> None:
    captured = capture(nn.Sequential(SampledAttention()), {"input": X})
    assert not captured.calls
    assert captured.gaps.unread["0"].code == "weights_lost"
