"""One backward pass predicts what patching modules one by one measures."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from equipoise.auditing.precision.emulation import Bench, Storage
from equipoise.auditing.precision.lazy_product import LazyProduct
from equipoise.auditing.precision.prediction import Prediction, _size, predicted
from equipoise.errors import InputError
from tests.auditing.precision.models import tokens
from tests.models import GPT, GPTConfig
from tests.oracles import fragility as oracle


def small_gpt() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=32, depth=3, heads=4, context=32))
    return model, torch.randint(0, 256, (2, 24))


@cache
def many_probes() -> Prediction:
    model, ids = tokens(tied=False)
    return predicted(model, ids, storage=Storage.named("fp16"), probes=150, seed=1)


@pytest.mark.parametrize(
    "site", ["embed", "attend.qkv", "attend", "mlp.norm", "mlp", ""]
)
def test_each_module_is_its_jacobian_times_residuals(site: str) -> None:
    """Against Σ r²‖∂Y/∂x‖² with ‖∂Y/∂x‖² from one backward per output entry."""
    model, ids = tokens(tied=False)
    found = many_probes().variance[site]
    brute = oracle.module_variance(model, ids, site, Storage.named("fp16"))
    # 150 probes: √(2/150) = 12 % when one number carries all of it, here far less.
    assert sum(found.values()) == pytest.approx(brute, rel=0.12)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2"])
def test_predicts_a_small_gpt(name: str) -> None:
    model, ids = small_gpt()
    storage, bench = Storage.named(name), Bench(model, ids)
    found = predicted(model, ids, storage=storage, probes=2)
    assert 0.5 <= bench.mismatch(storage) / found.total <= 2
    measured = bench.by_module(storage)
    assert set(measured) == set(found.variance)
    ranks = spearmanr([found.by_module[s] for s in measured], list(measured.values()))
    assert ranks.statistic >= 0.8


@pytest.mark.parametrize("c", [2.0**-4, 2.0**5])
def test_power_of_two_rescalings_change_nothing(c: float) -> None:
    model, ids = small_gpt()
    storage = Storage.named("bf16")
    before = predicted(model, ids, storage=storage).by_module
    with torch.no_grad():
        for block in model.blocks:
            block.attention.v_proj.weight.mul_(c)
            if block.attention.v_proj.bias is not None:
                block.attention.v_proj.bias.mul_(c)
            block.attention.o_proj.weight.div_(c)
    after = predicted(model, ids, storage=storage).by_module
    assert after == pytest.approx(before, rel=1e-6)


def test_sampled_weight_columns_are_unbiased() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 640)
    x = torch.randn(5, 16)
    storage = Storage.named("bf16")
    # Y = xW + b: the weight term has a closed form, Σ x²w(W) + 5·Σ w(b), over ‖Y‖².
    w = (storage.rounded(model.weight.detach()) - model.weight.detach()).square()
    b = (storage.rounded(model.bias.detach()) - model.bias.detach()).square()
    y = model(x).detach().square().sum()
    exact = ((x.square().sum(0) @ w.mT).sum() + 5 * b.sum()) / y
    seen = [
        predicted(model, x, storage=storage, seed=s).variance[""]["weight"]
        for s in range(60)
    ]
    assert sum(seen) / 60 == pytest.approx(exact.item(), rel=0.03)


def test_a_bias_moves_all_tokens_together() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            nn.init.eye_(self.lin.weight)  # exact in any format: only the bias errs

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x).mean(1)

    torch.manual_seed(0)
    model, x, storage = Pooled(), torch.randn(1, 7, 4), Storage.named("bf16")
    bias = model.lin.bias.detach()
    exact = (storage.rounded(bias) - bias).square().sum() / model(x).square().sum()
    found = predicted(model, x, storage=storage).variance["lin"]["weight"]
    assert found == pytest.approx(exact.item(), rel=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model, ids = small_gpt()
    model.train()
    flags = [p.requires_grad for p in model.parameters()]
    state = torch.get_rng_state()
    predicted(model, ids, storage=Storage.named("bf16"))
    assert model.training
    assert flags == [p.requires_grad for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["fp16", "e4m3"])
def test_a_model_that_works_in_place_reads_the_same(name: str) -> None:
    class Net(nn.Module):
        def __init__(self, *, in_place: bool) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.in_place = in_place

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            y = y.mul_(3.0).relu_() if self.in_place else (y * 3.0).relu()
            z: torch.Tensor = self.down(y)
            return z.add_(x) if self.in_place else z + x

    torch.manual_seed(0)
    x, storage = torch.randn(2, 5, 8), Storage.named(name)
    plain, in_place = Net(in_place=False), Net(in_place=True)
    in_place.load_state_dict(plain.state_dict())
    want = predicted(plain, x, storage=storage)
    found = predicted(in_place, x, storage=storage)
    assert found.by_module == pytest.approx(want.by_module, rel=1e-6)


def test_shares_and_names() -> None:
    found = Prediction(
        variance={"a": {"weight": 3e-6, "score": 1e-6}, "b": {"add": 4e-6}}
    )
    assert found.shares == pytest.approx({"a": 0.5, "b": 0.5})
    assert found.total == pytest.approx(math.sqrt(8e-6))
    assert found.dominant("a") == "weight"


def test_overflow_is_reported() -> None:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1e6)
    found = predicted(model, torch.ones(1, 2), storage=Storage.named("fp16"))
    assert not math.isfinite(found.total)


def test_errors() -> None:
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises(InputError, match="at least one probe"):
        predicted(model, torch.ones(1, 2), storage=Storage.named("bf16"), probes=0)
    with pytest.raises(InputError, match="two rows"):
        predicted(model, torch.ones(1, 2), storage=Storage.named("bf16"), rows=1)
    with pytest.raises(InputError, match="two words"):
        predicted(model, torch.ones(1, 2), storage=Storage.named("bf16"), words=1)
    with pytest.raises(InputError, match="nothing to be relative to"):
        predicted(model, torch.zeros(1, 2), storage=Storage.named("bf16"))


def test_some_rows_stand_for_all() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=32, depth=2, heads=4, context=256))
    ids, storage = torch.randint(0, 256, (1, 256)), Storage.named("bf16")
    every = predicted(model, ids, storage=storage, rows=None)
    few = predicted(model, ids, storage=storage, rows=16)
    assert every.sampling_error < few.sampling_error < 0.05
    # The same probe: only the rows differ, and five standard errors hold them.
    assert few.total == pytest.approx(every.total, rel=5 * few.sampling_error)


def test_the_stated_error_is_the_scatter_over_draws() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 64) * torch.rand(512, 1)
    storage = Storage.named("bf16")
    weighed = storage.rounded(x) - x
    exact = (weighed.square().sum() / x.square().sum()).sqrt().item()

    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

    found = [predicted(Same(), x, storage=storage, rows=32, seed=s) for s in range(150)]
    z = [(f.total / exact - 1) / f.sampling_error for f in found]
    # Systematic rows of independent tokens: the scatter is what is stated, ± 20 %.
    assert np.std(z) == pytest.approx(1.0, abs=0.2)
    assert abs(np.mean(z)) < 0.4


def test_heads_hold_what_is_made_inside_them() -> None:
    model, ids = small_gpt()
    found = predicted(model, ids, storage=Storage.named("bf16"))
    site = "blocks.1.attention"
    inside = sum(found.variance[site][kind] for kind in ("score", "prob", "mix"))
    assert len(found.heads[site]) == 4
    assert sum(found.heads[site]) == pytest.approx(inside, rel=1e-12)


@pytest.mark.parametrize("mixing", [False, True])
def test_a_wide_output_layer_is_probed_at_a_sample_of_tokens(mixing: bool) -> None:
    """6000 words: unbiased against every word probed; log-softmax mixes them all."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.head = nn.Linear(8, 6000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(torch.tanh(self.inner(x)))
            return y.log_softmax(-1) if mixing else y

    torch.manual_seed(0)
    model, x, storage = Words(), torch.randn(1, 12, 8), Storage.named("bf16")
    inner = model.inner(x).detach().tanh()
    weight = model.head.weight.detach()
    mean = model.head(inner).detach().softmax(-1) @ weight  # log-softmax: W - 1pᵀW
    gain = (weight - (mean[0][:, None] if mixing else 0.0)).square().sum(-2)
    r2 = (storage.rounded(inner) - inner).square()[0]
    y = model(x).detach()
    exact = (r2 * gain).sum() / y.square().sum()
    seen = [
        predicted(model, x, storage=storage, seed=s).variance[""]["tanh"]
        for s in range(40)
    ]
    assert np.mean(seen) == pytest.approx(exact.item(), rel=0.1)


def test_the_size_of_some_features_has_the_error_of_a_finite_sample() -> None:
    """Drawn without replacement: of 40 features 30 leave half the error, 40 none."""
    rng = torch.Generator().manual_seed(0)
    y = torch.randn(3, 40, generator=rng) * (1 + torch.arange(40) / 8)
    lazy = LazyProduct.of(y[:, :1], 40, made=lambda: y, some=lambda m: y[:, m])
    sizes, errors = [], []
    for _ in range(400):
        chosen = torch.randperm(40, generator=rng)[:30]
        size, error = _size(lazy, [lazy.some(chosen)])
        sizes.append(size)
        errors.append(error)
    truth = float(y.norm())
    # 400 draws know a standard deviation to 4 %; without the factor it is 2×.
    assert np.std(sizes) / truth == pytest.approx(np.mean(errors), rel=0.2)
    assert _size(lazy, [y]) == (pytest.approx(truth), 0.0)
