"""Emulation rounds what is stored, where it is stored, and leaves nothing behind."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from equipoise.auditing.precision.emulation import Storage, all_but, emulated, only
from equipoise.auditing.precision.walk import LinearCall, walked
from equipoise.numerics.formats import FORMATS
from equipoise.numerics.rounding import rounded
from tests.auditing.precision.models import Attends, Residual, tokens

BF16 = Storage.named("bf16")


def fl(x: Tensor) -> Tensor:
    return rounded(x, FORMATS["bf16"])


def hook_count(model: nn.Module) -> int:
    """Return how many hooks a model's calls meet: its modules' own, and torch's."""
    own = (len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    for_all = (
        torch_modules._global_forward_hooks,
        torch_modules._global_forward_pre_hooks,
    )
    return sum(own) + sum(map(len, for_all))


def test_every_stored_tensor_is_rounded_once(rng: torch.Generator) -> None:
    model = Residual().double()
    x = torch.randn(3, 8, generator=rng, dtype=torch.float64)
    w = {name: fl(p.detach()) for name, p in model.named_parameters()}
    n = fl(torch.layer_norm(x, (8,), w["norm.weight"], w["norm.bias"]))
    up = fl(nn.functional.linear(n, w["up.weight"], w["up.bias"]))
    down = fl(
        nn.functional.linear(
            fl(nn.functional.gelu(up)), w["down.weight"], w["down.bias"]
        )
    )
    with torch.no_grad(), emulated(model, BF16):
        found = model(x)
    assert torch.equal(found, fl(x + down))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_is_opened(
    causal: bool, fused: bool, rng: torch.Generator
) -> None:
    """A fused kernel stores its probabilities and its result, and no scores."""
    model = Attends(causal=causal).double()
    x = torch.randn(1, 5, 8, generator=rng, dtype=torch.float64)
    qkv = fl(nn.functional.linear(x, fl(model.qkv.weight), fl(model.qkv.bias)))
    q, k, v = qkv.view(1, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    s = q @ k.mT / 2
    s = s if fused else fl(s)
    if causal:
        s = s.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -math.inf)
    a = fl(fl(s.softmax(-1)) @ v).transpose(1, 2).flatten(2)
    out = fl(nn.functional.linear(a, fl(model.out.weight), fl(model.out.bias)))
    storage = Storage.named("bf16", fused=fused)
    with torch.no_grad(), emulated(model, storage) as sites:
        assert torch.equal(model(x), out)
    assert list(sites) == ["qkv", "", "out"]


def test_narrow_products_read_narrow_numbers_and_may_leave_a_sum_wide(
    rng: torch.Generator,
) -> None:
    """Kept: the norm and the last product; their readers and its matrix are narrow."""
    model = Residual().double()
    x = torch.randn(3, 8, generator=rng, dtype=torch.float64)
    w = {name: p.detach() for name, p in model.named_parameters()}
    n = torch.layer_norm(x, (8,), w["norm.weight"], w["norm.bias"])
    up = fl(nn.functional.linear(fl(n), fl(w["up.weight"]), fl(w["up.bias"])))
    a = fl(nn.functional.gelu(up))
    down = nn.functional.linear(a, fl(w["down.weight"]), fl(w["down.bias"]))
    storage = Storage.named("bf16", narrow_products=True)
    with torch.no_grad(), emulated(model, storage, narrow=all_but({"norm", "down"})):
        assert torch.equal(model(x), fl(x + down))


def test_only_and_all_but_are_complements() -> None:
    model, ids = tokens()
    with torch.no_grad():
        exact = model(ids)
        with emulated(model, BF16, narrow=only(())) as sites:
            untouched = model(ids)
        with emulated(model, BF16, narrow=all_but(sites)):
            kept = model(ids)
        with emulated(model, BF16, narrow=only({"mlp.up"})):
            one = model(ids)
    # Fused attention is opened, so the last bit may differ, not more.
    torch.testing.assert_close(untouched, exact, rtol=1e-12, atol=1e-12)
    assert torch.equal(untouched, kept)
    assert not torch.allclose(one, exact, rtol=1e-6)


@pytest.mark.parametrize(
    ("sdpa_args", "name"),
    [
        ({"attn_mask": torch.ones(4, 4, dtype=torch.bool).tril()}, "bool mask"),
        ({"attn_mask": torch.randn(4, 4, dtype=torch.float64)}, "additive mask"),
        ({"scale": 0.3}, "scale"),
        ({"is_causal": True}, "causal"),
        ({"enable_gqa": True}, "grouped"),
    ],
)
def test_opened_attention_is_the_same_function(
    sdpa_args: dict[str, object], name: str, rng: torch.Generator
) -> None:
    class Calls(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v, **sdpa_args)

    heads = 1 if name == "grouped" else 2
    q = torch.randn(1, 2, 4, 3, generator=rng, dtype=torch.float64)
    k, v = torch.randn(2, 1, heads, 4, 3, generator=rng, dtype=torch.float64)
    model = Calls()
    with emulated(model, BF16, narrow=only(())):
        found = model(q, k, v)
    torch.testing.assert_close(found, model(q, k, v))


def test_eight_bits_are_scaled_and_sixteen_not() -> None:
    x = torch.tensor([1e-4, 3e-5], dtype=torch.float64)
    scaled, plain = Storage.named("e4m3"), Storage.named("e4m3", scaled=False)
    assert plain.rounded(x).tolist() == [0.0, 0.0]
    torch.testing.assert_close(scaled.rounded(x), x, rtol=2**-4, atol=0)
    assert scaled.scales and not Storage.named("fp16").scales


def test_tables_made_ahead_stay_wide() -> None:
    class Rotary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            angle = torch.arange(4, dtype=torch.float64) * 1001.001
            return x * angle.cos()

    with emulated(Rotary(), BF16):
        found = Rotary()(torch.ones(4, dtype=torch.float64))
        table = Rotary()
        inside = table(torch.ones(4, dtype=torch.float64))
    exact = (torch.arange(4, dtype=torch.float64) * 1001.001).cos()
    torch.testing.assert_close(found, exact)  # another instance: nothing walked
    torch.testing.assert_close(inside, exact)
    model = Rotary()
    with emulated(model, BF16):
        assert torch.equal(model(torch.ones(4, dtype=torch.float64)), fl(exact))


MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "bool": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
    "per head": {"attn_mask": torch.ones(4, 5, 5).triu(1) * -2},
    "padding": {"key_padding_mask": torch.arange(10).view(2, 5) == 4},
    "both": {
        "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.arange(10).view(2, 5) == 4,
    },
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 6}, {"bias": False}])
def test_torch_multihead_attention_is_opened(
    mask: str, options: dict[str, int], rng: torch.Generator
) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True, **options).double().eval()
    x = torch.randn(2, 5, 8, generator=rng, dtype=torch.float64)
    kv = x[..., : options.get("kdim", 8)]
    given = {
        k: m.double() if m.is_floating_point() else m for k, m in MASKS[mask].items()
    }
    with torch.no_grad():
        exact = model(x, kv, kv, need_weights=False, **given)[0]
        with emulated(model, BF16, narrow=only(())):
            same = model(x, kv, kv, need_weights=False, **given)[0]
        with emulated(model, BF16) as sites:
            found = model(x, kv, kv, need_weights=False, **given)[0]
    torch.testing.assert_close(same, exact)
    assert 1e-4 < (found - exact).norm() / exact.norm() < 2e-2
    assert list(sites) == [""]


def test_unbatched_and_unusual_multihead(rng: torch.Generator) -> None:
    x = torch.randn(5, 8, generator=rng, dtype=torch.float64)
    model = nn.MultiheadAttention(8, 2).double()
    with emulated(model, BF16, narrow=only(())):
        torch.testing.assert_close(model(x, x, x)[0], model.eval()(x, x, x)[0])
    other = nn.MultiheadAttention(8, 2, add_zero_attn=True, add_bias_kv=True).double()
    with emulated(other, BF16, narrow=only(())):
        out, weights = other(x, x, x)
    torch.testing.assert_close((out, weights), other(x, x, x))


def test_nothing_is_left_behind(rng: torch.Generator) -> None:
    model = Residual()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError), emulated(model, BF16):
        assert hook_count(model) > 0
        model(torch.zeros(2, 7))
    assert hook_count(model) == 0
    assert all(map(torch.equal, before, model.parameters()))
    x = torch.randn(2, 8, generator=rng)
    plain = model(x)
    with emulated(model, BF16):
        model(x)
    assert torch.equal(model(x), plain)


def test_gradients_pass_and_are_rounded(rng: torch.Generator) -> None:
    model = nn.Linear(4, 4, bias=False).double()
    x = torch.randn(3, 4, generator=rng, dtype=torch.float64)
    seed = torch.randn(3, 4, generator=rng, dtype=torch.float64)
    with emulated(model, BF16, gradients=True):
        (model(x) * seed).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, fl(fl(seed).mT @ x))


def test_sites_are_the_innermost_modules() -> None:
    seen: list[tuple[str, str]] = []

    class Notes:
        def parameter(self, site: str, parameter: nn.Parameter) -> Tensor:
            return parameter

        def stored(self, site: str, kind: str, x: Tensor) -> Tensor:
            seen.append((site, kind))
            return x

        def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
            return self.stored(site, "rows", weight[ids])

        def linear(self, site: str, call: LinearCall) -> Tensor:
            y = nn.functional.linear(call.x, call.oriented(call.weight), call.bias)
            return self.stored(site, "product", y)

        def operand(self, x: Tensor) -> Tensor:
            return x

    model, ids = tokens()
    with walked(model, Notes()):
        model(ids)
    assert seen == [
        ("embed", "rows"),
        ("attend.qkv", "product"),
        ("attend", "score"),
        ("attend", "prob"),
        ("attend", "mix"),
        ("attend.out", "product"),
        ("", "add"),
        ("mlp.norm", "norm"),
        ("mlp.up", "product"),
        ("mlp", "gelu"),
        ("mlp.down", "product"),
        ("mlp", "add"),
        ("", "product"),
    ]
