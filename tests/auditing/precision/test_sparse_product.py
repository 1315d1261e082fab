"""The product with a silent-feature backward is the dense one."""

import pytest
import torch

from equipoise.auditing.precision.lazy_product import sparse_product


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
    told = []
    y = sparse_product(x, w, b, heard=lambda *given: told.append(given))
    (found,) = torch.autograd.grad(y, x, g)
    z = x.detach().requires_grad_()
    want = torch.nn.functional.linear(z, w, b)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(found, torch.autograd.grad(want, z, g)[0])
    ((heard, features, rows),) = told
    assert torch.equal(rows, w[features])
    whole = torch.zeros_like(g).index_copy_(-1, features, heard)
    assert torch.equal(whole, g)
    if 0 < live < 20:
        assert torch.equal(features, some)


def test_features_live_in_other_rows_are_not_lost() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    w = torch.arange(30.0).reshape(10, 3)
    g = torch.zeros(2, 10)
    g[0, 1], g[1, 7] = 5.0, 1.0  # the largest row does not know of feature 7
    y = sparse_product(x, w, None, heard=lambda *given: None)
    (found,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(found, g @ w)
