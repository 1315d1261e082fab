"""Layouts and calls met after the tables: pairs, sentences without padding, bands."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.interception import Interceptor
from equipoise.anatomy.sites import Gaps
from equipoise.numerics.rows.statistics import row_statistics
from tests.zoo.reading import capture, deviation, expected
from tests.zoo.specimens import SIZES, Specimen, hugging, tokens
from tests.zoo.wider import translated


def captured(model: nn.Module, **batch: Any) -> tuple[list[AttentionCall], Any]:
    calls, anatomy, _ = intercepted(model, **batch)
    return calls, anatomy


def intercepted(
    model: nn.Module, **batch: Any
) -> tuple[list[AttentionCall], Any, Gaps]:
    calls: list[AttentionCall] = []
    anatomy = anatomy_of(model)
    with torch.no_grad(), Interceptor(anatomy, calls.append) as interceptor:
        model(**batch)
    return calls, anatomy, interceptor.gaps


def test_cross_attention_of_gpt2_has_a_map_for_queries_and_one_for_the_rest() -> None:
    """The projections, applied to the inputs, are the queries and keys of the call."""
    model = hugging(
        "GPT2Model", n_embd=32, n_head=4, n_layer=1, add_cross_attention=True
    )
    subject, batch = model("sdpa"), translated()
    asked: list[Tensor] = []
    cross = subject.get_submodule("h.0.crossattention")
    cross.register_forward_pre_hook(lambda m, args: asked.append(args[0].detach()))
    calls, anatomy = captured(subject, **batch)
    call = next(c for c in calls if c.cross)
    maps = anatomy.site(cross).projections
    assert (maps.heads, maps.kv_heads) == (4, 4)
    inputs = {"q": asked[0], "k": batch["encoder_hidden_states"]}
    for letter, found in (("q", call.q_BHQD), ("k", call.k_BGKD)):
        made = torch.einsum("btd,hrd->bhtr", inputs[letter], maps.by_head(letter))
        assert found is not None
        torch.testing.assert_close(made, found)  # GPT-2's biases start at zero


class Ragged(nn.Module):
    """Two heads over sentences that are kept without padding."""

    num_heads = 2

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_sentences_without_padding_are_read_as_each_alone(layout: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 2, 4, generator=rng) for n in (5, 3, 8)]
    if layout is torch.jagged:  # (B, tokens, H, D), the only order it knows
        nested = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    else:
        nested = torch.nested.nested_tensor([x.transpose(0, 1) for x in parts])
    (call,), _ = captured(Ragged(), x=nested)
    read = torch.cat([row_statistics(s).entropy for _, s in call.blocks()], -1)
    counted = call.counted_BQ()
    for b, x in enumerate(parts):
        length = x.shape[0]
        assert counted[b].tolist() == [i < length for i in range(8)]
        p = (torch.einsum("qhd,khd->hqk", x, x).double() / 2).softmax(-1)
        truth = -(p * p.log()).sum(-1)
        torch.testing.assert_close(read[b, :, :length].double(), truth)


def test_bands_that_cannot_be_followed_are_named() -> None:
    model = hugging("LongformerModel", attention_window=4)("eager")
    calls, anatomy, gaps = intercepted(model, **tokens())
    assert not calls and len(gaps.unread) == 2
    assert all(why.code == "weights_lost" for why in gaps.unread.values())
    assert not any(site.declared for site in anatomy.attention), "or training would end"


def test_a_dynamic_convolution_is_named_and_attention_beside_it_read() -> None:
    model = hugging(
        "ConvBertModel", embedding_size=32, head_ratio=2, conv_kernel_size=3
    )("eager")
    calls, anatomy, gaps = intercepted(model, **tokens())
    sites = [site.name for site in anatomy.attention]
    assert [anatomy.names[id(call.module)] for call in calls] == sites
    length = tokens()["input_ids"].shape[1]
    assert all(call.shape[2:] == (length, length) for call in calls)
    assert list(gaps.partial) == sites
    assert all(why.code == "convolution" for (why,) in gaps.partial.values())


class Windows(nn.Module):
    """Local attention over windows of keys, which also asks one query at a time."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        padded = F.pad(x_BTD, (0, 0, 1, 1))
        near_BTDW = padded.unfold(1, 3, 1)
        scores_BT1W = x_BTD.unsqueeze(2) @ near_BTDW
        return (scores_BT1W.softmax(-1) @ near_BTDW.mT).squeeze(2)


def test_attention_over_windows_is_no_convolution() -> None:
    calls, _, gaps = intercepted(Windows(), x_BTD=torch.randn(2, 6, 8))
    assert len(calls) == 1 and not gaps.partial


def test_scores_that_grow_are_read_to_their_own_rounding() -> None:
    """MobileBERT has no norms: its second layer's scores are near fifty."""
    sizes = {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32}
    build = hugging("MobileBertModel", **sizes)
    specimen = Specimen(name="MobileBertModel", build=build, batch=tokens, calls=2)
    with torch.no_grad():
        read = capture(build("eager"), tokens()).calls
        truth = expected(specimen, build("eager"), tokens())
    for here, there in zip(read, truth, strict=True):
        largest = max(1.0, float(there.max_logit[there.counted].abs().max()))
        # Errors of the scores reach θ and the entropy through them: tens of ε of each.
        assert max(deviation(here.rows, there).values()) < 2e-6 * largest


def test_a_recurrent_mixer_is_no_attention() -> None:
    model = hugging("MambaForCausalLM", state_size=4)("eager")
    calls, anatomy = captured(model, input_ids=tokens()["input_ids"])
    assert not calls and not anatomy.attention and len(anatomy.blocks) == 2


def test_layers_of_two_classes_are_one_stack() -> None:
    config = transformers.JambaConfig(
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        num_key_value_heads=2, num_experts=2, num_experts_per_tok=1,
        attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False,
    )  # fmt: skip
    anatomy = anatomy_of(transformers.JambaForCausalLM(config))
    assert list(anatomy.blocks) == ["model.layers.0", "model.layers.1"]
    assert [site.layer for site in anatomy.attention] == [1]
