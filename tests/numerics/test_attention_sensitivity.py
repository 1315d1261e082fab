"""θ/τ from queries and keys: equal to the dense rows, without ever forming them all."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.errors import InputError
from equipoise.numerics import attention_sensitivity
from equipoise.numerics.attention_sensitivity import sensitivity
from equipoise.numerics.rows.balance import balance
from tests.conftest import FLOATS

B, H, G, L, D = 2, 6, 2, 21, 8


@pytest.fixture
def qk(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    q = 3 * torch.randn(B, H, L, D, generator=rng, dtype=torch.float64)
    return q, torch.randn(B, G, L, D, generator=rng, dtype=torch.float64)


def dense(
    q: Tensor, k: Tensor, shift: Tensor | float = 0.0, temperature: float = 1.0
) -> Tensor:
    """Return θ/τ with every score formed, heads repeated, and one softmax."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(H // G, 1)) / D**0.5
    return balance(((scores + shift) / temperature).softmax(-1)).lower / temperature


@pytest.fixture(params=[1, 5, L, 1000])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one query, of several with a short last one, and of all."""
    monkeypatch.setattr(attention_sensitivity, "_BLOCK", request.param * L * B * H)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_dense_rows(
    qk: tuple[Tensor, Tensor], causal: bool, temperature: float, block: None
) -> None:
    shift = torch.zeros(L, L).masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
    found = sensitivity(*qk, temperature=temperature, causal=causal)
    expected = dense(*qk, shift if causal else 0.0, temperature)
    torch.testing.assert_close(found.lower, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.upper, expected, rtol=0, atol=1e-12)
    assert found.exact.all()
    assert found.witness is None


@pytest.mark.parametrize("shape", [(L,), (L, L), (B, 1, L, L), (B, 1, 1, L)])
def test_masks_broadcast(
    qk: tuple[Tensor, Tensor], shape: tuple[int, ...], block: None, rng: torch.Generator
) -> None:
    seen = torch.rand(shape, generator=rng) < 0.6
    seen[..., 0] = True
    added = torch.randn(shape, generator=rng, dtype=torch.float64)
    hidden = torch.zeros(shape).masked_fill(~seen, -torch.inf)
    for mask, shift in ((seen, hidden), (added, added)):
        found = sensitivity(*qk, mask=mask, temperature=2.0)
        expected = dense(*qk, shift, 2.0)
        torch.testing.assert_close(found.lower, expected, rtol=0, atol=1e-12)


def test_a_query_that_sees_nothing_reads_nan(qk: tuple[Tensor, Tensor]) -> None:
    seen = torch.ones(L, L, dtype=torch.bool)
    seen[3] = False
    blind = sensitivity(*qk, mask=seen).lower.isnan()
    assert blind[..., 3].all()
    assert blind.sum() == B * H


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes_and_scale(dtype: torch.dtype, qk: tuple[Tensor, Tensor]) -> None:
    q, k = (t.to(dtype) for t in qk)
    found = sensitivity(q, k, scale=0.1)
    assert found.lower.dtype == torch.promote_types(dtype, torch.float32)
    expected = dense(q.double() * 0.1 * D**0.5, k.double())
    torch.testing.assert_close(found.lower.double(), expected, rtol=0, atol=1e-5)


def test_without_heads_or_queries() -> None:
    q = torch.zeros(5, 4, requires_grad=True)
    assert sensitivity(q, q).lower.tolist() == pytest.approx([0.96] * 5)
    assert sensitivity(q[:0], q).lower.shape == (0,)


class Largest(TorchDispatchMode):
    """Remembers the most elements any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_never_forms_all_scores() -> None:
    q = torch.randn(4096, 16)
    with Largest() as largest:
        sensitivity(q, q, causal=True)
    assert largest.elements <= attention_sensitivity._BLOCK < 4096**2


@pytest.mark.parametrize(
    ("q", "k", "options", "message"),
    [
        ((4, 8), (4, 7), {}, "one width"),
        ((4, 8), (0, 8), {}, "at least one key"),
        ((8,), (4, 8), {}, "tokens, width"),
        ((6, 4, 8), (4, 4, 8), {}, "6 query heads cannot share 4 key heads"),
        ((4, 8), (4, 8), {"temperature": 0.0}, "temperature must be positive"),
        ((4, 8), (4, 8), {"temperature": float("nan")}, "temperature must be positive"),
    ],
)
def test_what_cannot_be_used(
    q: tuple[int, ...], k: tuple[int, ...], options: dict[str, float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        sensitivity(torch.zeros(q), torch.zeros(k), **options)  # type: ignore[arg-type]
