"""A lazy product, read in part or in full, is the product; so is the sparse one."""

import math
from collections.abc import Callable
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.auditing.precision import error_terms
from equipoise.auditing.precision.emulation import Storage
from equipoise.auditing.precision.error_terms import ErrorTerms
from equipoise.auditing.precision.lazy_product import LazyProduct, sparse_product
from equipoise.auditing.precision.prediction import _followed, _size, _views, predicted
from equipoise.errors import InputError
from tests.auditing.precision.models import Attends, Residual
from tests.oracles import fragility as oracle

STORAGE = Storage.named("fp16")


class Words(nn.Module):
    """Attention, a residual and a head; ``end`` is done to the logits."""

    def __init__(self, words: int, end: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.attend, self.mlp = Attends(causal=True), Residual()
        self.head = nn.Linear(8, words)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.mlp(x + self.attend(x)))
        return y if self.end is None else self.end(y)


def words(
    n: int, end: Callable[[Tensor], Tensor] | None = None
) -> tuple[Words, Tensor]:
    torch.manual_seed(0)
    return Words(n, end).double(), torch.randn(1, 2, 8).double()


def promised(log: list[str] | None = None) -> tuple[LazyProduct, Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(5, 3)

    def made() -> Tensor:
        if log is not None:
            log.append("made")
        return x @ w.mT

    return LazyProduct.of(x, 5, made=made, some=lambda m: x @ w[m].mT), x @ w.mT


@cache
def every_draw() -> dict[str, float]:
    """Return each module's mean over every draw of two of four words, every sign."""
    model, x = words(4)
    carriage = ErrorTerms(STORAGE, torch.Generator())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(error_terms, "WIDE", 4)
        y = _followed(model, x, carriage)
    assert isinstance(y, LazyProduct)
    larger = math.sqrt(4 / 2) / model(x).detach().norm()
    views = [y.some(torch.tensor(some)) for some in combinations(range(4), 2)]
    for view, signs in product(views, product((-1.0, 1.0), repeat=4)):
        probe = torch.tensor(signs).view(1, 2, 2) * larger
        torch.autograd.backward(view, probe, retain_graph=True)
    assert not y.is_made
    return {
        site: sum(note.total for notes in kinds.values() for note in notes) / 96
        for site, kinds in carriage.sums.items()
    }


@pytest.mark.parametrize("site", ["attend.qkv", "attend", "mlp.norm", "mlp", "head"])
def test_tokens_drawn_at_random_are_unbiased(site: str) -> None:
    """Against one backward pass per output entry."""
    brute = oracle.module_variance(*words(4), site, STORAGE)
    assert every_draw()[site] == pytest.approx(brute, rel=1e-9)


def test_a_sample_of_tokens_estimates_all() -> None:
    """Eight draws of 2048 of 6000 words scatter about the full probe's answer."""
    torch.manual_seed(0)
    model = Words(6000)
    x = torch.randn(1, 24, 8)
    storage = Storage.named("bf16")
    every = predicted(model, x, storage=storage, words=None, probes=8)
    some = predicted(model, x, storage=storage, probes=8)
    # One module's few large weights scatter by a fifth over probes; the sum does not.
    assert some.total == pytest.approx(every.total, rel=0.05)
    assert every.sampling_error < some.sampling_error < 0.05


def test_the_stated_error_of_the_norm_is_its_scatter() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Tanh(), nn.Linear(8, 6000)), torch.randn(1, 12, 8)
    exact, z = float(model(x).detach().norm()), []
    y = _followed(model, x, ErrorTerms(STORAGE, torch.Generator()))
    for seed in range(150):
        rng = torch.Generator().manual_seed(seed)
        size, spread = _size(y, _views(y, rng, probes=2, words=128))
        z.append((size / exact - 1) / spread)
    assert np.std(z) == pytest.approx(1.0, abs=0.2)
    assert abs(np.mean(z)) < 0.4


def tempered(y: Tensor) -> Tensor:
    y /= 0.5
    return y


def hidden(y: Tensor) -> Tensor:
    y[..., 0] = 0.0
    return y


def watched(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.argmax(-1)
    return y


@pytest.mark.parametrize("end", [torch.tanh, tempered, hidden, watched])
@pytest.mark.parametrize("site", ["attend", "head", ""])
def test_a_head_that_is_used_further_is_computed_in_full(
    end: Callable[[Tensor], Tensor], site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = words(5, end)
    plain = predicted(model, x, storage=STORAGE)
    monkeypatch.setattr(error_terms, "WIDE", 4)
    found = predicted(model, x, storage=STORAGE)
    assert found.total == pytest.approx(plain.total, rel=1e-9)
    assert found.variance.get(site) == pytest.approx(plain.variance.get(site), rel=1e-9)


def test_asking_for_a_shape_computes_no_product() -> None:
    log: list[str] = []
    y, exact = promised(log)
    assert y.shape == exact.shape == y.size()
    assert (y.dtype, y.device, y.ndim) == (exact.dtype, exact.device, exact.dim())
    assert y.dim() == 2 and y.numel() == 10 and y.is_floating_point()
    torch.testing.assert_close(y.some(torch.tensor([4, 1])), exact[:, [4, 1]])
    assert log == [] and not y.is_made


def test_it_is_made_once_with_its_history() -> None:
    log: list[str] = []
    y, exact = promised(log)
    with torch.no_grad():
        assert torch.equal(y + 1, exact + 1)
    assert torch.equal(torch.cat([y, y]), torch.cat([exact, exact]))
    assert y.requires_grad and log == ["made"]
    assert torch.equal(torch.where(y > 0, input=y, other=y), exact)


def test_a_product_read_outside_torch_is_nan() -> None:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: Tensor) -> Tensor:
            return torch.Tensor.as_subclass(y, Tensor) * 1.0

    model = Words(5000, end=Round.apply)  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match="norm nan"):
        predicted(model, torch.randn(1, 2, 8), storage=STORAGE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("live", [0, 1, 3, 20, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_gradient_is_that_of_linear(dtype: torch.dtype, live: int, bias: bool) -> None:
    rng = torch.Generator().manual_seed(live)
    x = torch.randn(2, 5, 7, generator=rng, dtype=dtype, requires_grad=True)
    w = torch.randn(40, 7, generator=rng, dtype=dtype)
    b = torch.randn(40, generator=rng, dtype=dtype) if bias else None
    some = torch.randperm(40, generator=rng)[:live].sort().values
    g = torch.zeros(2, 5, 40, dtype=dtype)
    g[..., some] = torch.randn(2, 5, live, generator=rng, dtype=dtype)
    given_gradients = []
    y = sparse_product(
        x, w, b, on_gradient=lambda *given: given_gradients.append(given)
    )
    (found,) = torch.autograd.grad(y, x, g)
    z = x.detach().requires_grad_()
    want = torch.nn.functional.linear(z, w, b)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(found, torch.autograd.grad(want, z, g)[0])
    ((gradient, features, rows),) = given_gradients
    assert torch.equal(rows, w[features])
    full = torch.zeros_like(g).index_copy_(-1, features, gradient)
    assert torch.equal(full, g)
    if 0 < live < 20:
        assert torch.equal(features, some)


def test_features_live_in_other_rows_are_not_lost() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    w = torch.arange(30.0).reshape(10, 3)
    g = torch.zeros(2, 10)
    g[0, 1], g[1, 7] = 5.0, 1.0  # the largest row does not know of feature 7
    y = sparse_product(x, w, None, on_gradient=lambda *given: None)
    (found,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(found, g @ w)
