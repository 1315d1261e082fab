"""torch's fused encoder in evaluation: read, undisturbed, and left clean."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.profiler import profile

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.interception import Interceptor

FUSED = "aten::_transformer_encoder_layer_fwd"


def encoder(*, norm_first: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, list[Any], int]:
    """Return the output, the attention rows read, and how often the fused path ran."""
    rows: list[Tensor] = []

    def listen(call: AttentionCall) -> None:
        rows.extend(scores.softmax(-1) for _, scores in call.blocks())

    with profile() as seen, Interceptor(anatomy_of(model), listen):
        out = model(*args, **kwargs)
    fused = [e.count for e in seen.key_averages() if e.key == FUSED]
    return out, rows, sum(fused)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fused_path_stays_on(norm_first: bool, padded: bool) -> None:
    model, x = encoder(norm_first=norm_first), torch.randn(2, 6, 16)
    padding = torch.arange(6)[None] >= torch.tensor([[6], [4]]) if padded else None
    with torch.no_grad():
        alone = model(x, src_key_padding_mask=padding)
        out, rows, fused = captured(model, x, src_key_padding_mask=padding)
    assert torch.equal(alone, out)
    assert fused == 2 and len(rows) == 2


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_rows_are_those_of_the_slow_path(norm_first: bool) -> None:
    model, x = encoder(norm_first=norm_first), 3 * torch.randn(2, 6, 16) + 1
    with torch.no_grad():
        _, fast, _ = captured(model, x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            _, slow, fused = captured(model, x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert fused == 0
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_failing_layer_leaves_no_hook_and_no_mode() -> None:
    model = encoder()
    with torch.no_grad(), pytest.raises(RuntimeError):
        captured(model, torch.randn(2, 6, 7))
    assert torch._C._len_torch_function_stack() == 0
    assert not torch_modules._has_any_global_hook()
    assert not any(m._forward_pre_hooks_with_kwargs for m in model.modules())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_every_option_of_multihead_attention(training: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(
        *(16, 4),
        kdim=8,
        vdim=12,
        add_bias_kv=True,
        add_zero_attn=True,
        batch_first=batch_first,
    ).train(training)
    q, k, v = (torch.randn(5, 5, n) for n in (16, 8, 12))
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    hidden[0, 3:] = True
    blocked = torch.rand(20, 5, 5) > 0.7
    options = {"average_attn_weights": False, "key_padding_mask": hidden}
    (_, weights), (rows,), _ = captured(model, q, k, v, attn_mask=blocked, **options)
    torch.testing.assert_close(rows, weights, rtol=0, atol=1e-6)


def test_a_causal_hint_is_a_causal_mask() -> None:
    model, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    given = {"attn_mask": mask, "is_causal": True, "need_weights": False}
    _, (rows,), _ = captured(model, x, x, x, **given)
    _, weights = model(x, x, x, attn_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(rows, weights, rtol=0, atol=1e-6)


def test_unbatched() -> None:
    model, x = nn.MultiheadAttention(16, 4), torch.randn(6, 16)
    (_, weights), (rows,), _ = captured(model, x, x, x, average_attn_weights=False)
    torch.testing.assert_close(rows[0], weights, rtol=0, atol=1e-6)
