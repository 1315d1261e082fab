"""The lab's models do what their equations say, on every axis the papers vary."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.scaling import PATH_LENGTH
from equipoise_lab.models import (
    GPT,
    FeedForward,
    GPTConfig,
    MixtureOfExperts,
    SelfAttention,
    ViT,
    ViTConfig,
    gpt_preset,
    vit_preset,
)
from equipoise_lab.models.block import rotated
from equipoise_lab.models.vit import patches
from equipoise_lab.options import from_mapping
from lab.tests import slow_models as oracle

SMALL = GPTConfig(width=16, depth=2, heads=4, context=12, vocabulary=11)
AXES = {
    "residual": ["pre", "post", "deepnorm", "deepnorm-original", "sandwich"],
    "norm": ["layernorm", "rmsnorm"],
    "attention": ["standard", "shared", "linear"],
    "activation": ["gelu", "relu", "swiglu"],
    "positions": ["learned", "sinusoidal", "rope", "none"],
    "kv_heads": [1, 2, 4],
    "qk_norm": [True],
    "softcap": [5.0],
    "experts": [3],
    "gains": ["path", "deepnorm", "gpt2"],
    "tied": [False],
    "head_width": [6],
}
VARIANTS = [(axis, value) for axis, values in AXES.items() for value in values]


def tokens(n: int = 2, T: int = 12) -> Tensor:
    return torch.randint(0, 11, (n, T), generator=torch.Generator().manual_seed(0))


def attention(**options: object) -> SelfAttention:
    torch.manual_seed(0)
    config = from_mapping(GPTConfig, {"width": 16, "heads": 4, **options})
    module = SelfAttention(config, causal=True).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.parametrize(("axis", "value"), VARIANTS)
def test_every_axis_trains_and_looks_only_back(axis: str, value: object) -> None:
    torch.manual_seed(0)
    model = GPT(replace(SMALL, **{axis: value}))  # type: ignore[arg-type]
    x = tokens()
    logits = model(x)
    logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    changed = x.clone()
    changed[:, 8:] = (x[:, 8:] + 1) % 11
    # Equal up to rounding: experts get other batches of tokens, summed elsewhere.
    torch.testing.assert_close(
        model(changed)[:, :8], logits[:, :8], rtol=1e-4, atol=1e-5
    )
    assert not torch.equal(model(changed)[:, 8:], logits[:, 8:])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_heads": 2},
        {"attention": "shared"},
        {"softcap": 2.0},
        {"temperature": 3.0},
        {"head_width": 6},
    ],
    ids=str,
)
def test_attention_matches_the_oracle(options: dict[str, object]) -> None:
    module = attention(**options)
    x_TC = torch.randn(7, 16, dtype=torch.float64)
    expected = oracle.attention(
        x_TC,
        module,
        heads=4,
        kv_heads=module.config.groups,
        tau=module.temperature,
        cap=module.config.softcap,
    )
    torch.testing.assert_close(module(x_TC[None])[0], expected, rtol=0, atol=1e-12)


def test_a_normaliser_replaces_softmax_and_sees_masked_scores() -> None:
    seen: list[Tensor] = []

    def spy(z: Tensor) -> Tensor:
        seen.append(z)
        return z.softmax(-1)

    module = attention()
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    fused = module(x)
    module.normaliser = spy
    torch.testing.assert_close(module(x), fused, rtol=0, atol=1e-12)
    assert seen[0][0, 0].isneginf().equal(torch.ones(7, 7).triu(1).bool())


def test_linear_attention_rows_average_the_values() -> None:
    """A constant value comes out unchanged: rows are non-negative and sum to 1."""
    module = attention(attention="linear")
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    q, k, v = module.projected(x)
    y = module.linear(q, k, torch.ones_like(v))
    torch.testing.assert_close(y, torch.ones_like(y), rtol=0, atol=1e-12)


def test_temperature_is_a_plain_attribute() -> None:
    module = attention()
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    module.temperature = 1e9  # every row becomes uniform over what it sees
    _, _, v = module.projected(x)
    mean = v.cumsum(2) / torch.arange(1, 8)[:, None]
    expected = module.o_proj(mean.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-6)
    assert not list(module.buffers())


def test_qk_norm_bounds_the_scores() -> None:
    module = attention(qk_norm=True)
    torch.nn.init.ones_(module.q_norm.weight)
    torch.nn.init.ones_(module.k_norm.weight)
    q, k, _ = module.projected(100 * torch.randn(1, 7, 16, dtype=torch.float64))
    scores = q @ k.mT * module.scale
    assert scores.abs().max() <= math.sqrt(module.config.per_head) + 1e-6


def test_rotation_keeps_norms_and_makes_scores_relative() -> None:
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, 9, 8)
    turned = rotated(x)[0, 0]
    torch.testing.assert_close(turned.norm(dim=-1), x[0, 0].norm(dim=-1))
    scores = turned @ turned.T
    for shift in range(3):
        diagonal = scores.diagonal(shift)
        # Phases are float32: their error grows with the position.
        torch.testing.assert_close(
            diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4
        )


def test_post_norm_block_matches_the_oracle() -> None:
    torch.manual_seed(0)
    model = GPT(replace(SMALL, residual="post", activation="relu")).double()
    block = model.blocks[0]
    x = torch.randn(5, 16, dtype=torch.float64)
    y = oracle.attention(x, block.attention, heads=4, kv_heads=4)
    a = oracle.layernorm(x + y, block.attention_norm)
    up, down = block.feedforward.up_proj, block.feedforward.down_proj
    f = oracle.linear(oracle.linear(a, up).clamp(min=0), down)
    expected = oracle.layernorm(a + f, block.feedforward_norm)
    torch.testing.assert_close(block(x[None])[0], expected, rtol=0, atol=1e-12)


def test_the_two_forms_of_deepnorm_are_one() -> None:
    """LN(x + α f) and LN(a x + f) agree up to ε, since α = 1/a and LN is scale-free."""
    models = []
    for residual in ("deepnorm", "deepnorm-original"):
        torch.manual_seed(0)
        models.append(GPT(replace(SMALL, residual=residual, epsilon=1e-30)).double())
    ours, theirs = (model(tokens()) for model in models)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_swiglu_is_a_gate_times_a_value() -> None:
    torch.manual_seed(0)
    module = FeedForward(GPTConfig(width=4, heads=1, activation="swiglu")).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    gate = oracle.linear(x, module.gate_proj)
    hidden = gate / (1 + (-gate).exp()) * oracle.linear(x, module.up_proj)
    expected = oracle.linear(hidden, module.down_proj)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-12)


def test_a_mixture_is_the_weighted_sum_of_its_best_experts() -> None:
    torch.manual_seed(0)
    config = GPTConfig(width=8, heads=1, experts=4, experts_per_token=2)
    module = MixtureOfExperts(config)
    torch.nn.init.normal_(module.router.weight, std=2)
    x = torch.randn(1, 6, 8)
    y = module(x)
    for token in range(6):
        p = module.router(x[0, token]).softmax(-1)
        best = sorted(range(4), key=lambda e: -p[e])[:2]
        total = sum(p[e] for e in best)
        expected = sum(p[e] / total * module.experts[e](x[0, token]) for e in best)
        torch.testing.assert_close(y[0, token], expected, rtol=1e-5, atol=1e-6)
    assert module.balance_loss is not None and module.balance_loss > 1 - 1e-6


@pytest.mark.parametrize(
    ("gains", "name", "expected"),
    [
        ("path", "q_proj", 16 ** (-1 / 4)),
        ("path", "up_proj", 1.0),
        ("deepnorm", "v_proj", (8 * 16) ** (-1 / 4)),
        ("deepnorm", "k_proj", 1.0),
        ("deepnorm", "down_proj", (8 * 16) ** (-1 / 4)),
        ("gpt2", "o_proj", 32 ** (-1 / 2)),
        ("gpt2", "v_proj", 1.0),
    ],
)
def test_gains(gains: str, name: str, expected: float) -> None:
    weights = []
    for chosen in ("none", gains):
        torch.manual_seed(0)
        model = GPT(replace(SMALL, depth=16, gains=chosen))  # type: ignore[arg-type]
        weights.append(dict(model.named_parameters()))
    name = next(key for key in weights[0] if key.endswith(f"{name}.weight"))
    ratio = (weights[1][name] / weights[0][name]).mean().item()
    assert ratio == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "m"), PATH_LENGTH.items())
def test_path_gain_makes_the_product_of_m_maps_one_in_n(kind: str, m: int) -> None:
    config = replace(SMALL, depth=81, attention=kind, gains="path")  # type: ignore[arg-type]
    from equipoise_lab.models import path_gain

    assert path_gain(config) ** m == pytest.approx(1 / 81)


def test_init_keeps_operator_norms_over_width() -> None:
    norms = []
    for width in (64, 256):
        torch.manual_seed(0)
        model = GPT(GPTConfig(width=width, depth=1))
        weight = model.blocks[0].attention.q_proj.weight
        norms.append(torch.linalg.matrix_norm(weight, ord=2).item())
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (gpt_preset("paper-774m"), 774_030_080),  # GPT-2 large
        (vit_preset("petrov-mnist"), 3_642),  # as published
    ],
)
def test_presets_have_the_published_size(config: object, count: int) -> None:
    with torch.device("meta"):
        model = GPT(config) if isinstance(config, GPTConfig) else ViT(config)  # type: ignore[arg-type]
    assert sum(p.numel() for p in model.parameters()) == count


def test_baek_tiny_vit_has_heads_wider_than_the_model() -> None:
    config = vit_preset("baek-tiny")
    assert (config.tokens, config.heads * config.per_head) == (65, 256)
    assert ViT(config)(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_patches_are_in_reading_order() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4)
    assert patches(image, 2)[0].tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "none"])
def test_vit_variants_train(pool: str, positions: str) -> None:
    config = ViTConfig(image=8, width=16, depth=2, pool=pool, positions=positions)  # type: ignore[arg-type]
    model = ViT(config)
    model(torch.randn(2, 3, 8, 8)).logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_dropout_is_the_only_noise() -> None:
    model = GPT(replace(SMALL, dropout=0.5))
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"residual": "peri"}, "one of pre, post"),
        ({"width": 10}, "does not divide into 4 heads"),
        ({"kv_heads": 3}, "cannot share 3 kv_heads"),
        ({"head_width": 5, "positions": "rope"}, "odd"),
        ({"dropout": 1.0}, "dropout"),
        ({"softcap": -1.0}, "softcap"),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token 3 of 2"),
        ({"attention": "shared", "kv_heads": 2}, "as many kv_heads"),
        ({"depth": 0}, "depth must be positive"),
        ({"vocabulary": 0}, "vocabulary"),
        ({"context": 0}, "context"),
        ({"widht": 64}, "did you mean 'width'"),
        ({"zzz": 1}, "there are activation"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_one_line(
    options: dict[str, object], says: str
) -> None:
    with pytest.raises(InputError, match=says) as caught:
        from_mapping(GPTConfig, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pool": "max"}, "cls, mean"),
        ({"positions": "rope"}, "learned, sinusoidal, none"),
        ({"patch": 5}, "does not cut"),
        ({"classes": 0}, "classes"),
    ],
)
def test_vit_options(options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        from_mapping(ViTConfig, options)


def test_wrong_inputs_raise_an_error_that_names_what_fits() -> None:
    with pytest.raises(InputError, match="13 tokens do not fit context 12"):
        GPT(SMALL)(tokens(T=13))
    with pytest.raises(InputError, match=r"reads \(3, 32, 32\)"):
        ViT(ViTConfig())(torch.zeros(1, 1, 28, 28))
    with pytest.raises(InputError, match="no preset 'big'; there are demo"):
        gpt_preset("big")
