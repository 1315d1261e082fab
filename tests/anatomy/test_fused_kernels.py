"""Kernels from outside torch are read from their arguments, packs by document."""

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from equipoise.anatomy import fused_kernels, kernel_functions
from equipoise.anatomy.call_stack import Caller
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.fused_kernels import kernel_call
from equipoise.anatomy.interception import Interceptor
from tests.anatomy.flash_stand_in import dense, flash_attn, scores_of_one
from tests.zoo.specimens import SPECIMENS

# float32 products of numbers near 1 over 8 terms, against float64.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(call: AttentionCall) -> Tensor:
    """Return all scores of a call, hidden keys at -inf."""
    K = call.shape[3]
    blocks = [F.pad(z, (0, K - z.shape[-1]), value=-math.inf) for _, z in call.blocks()]
    return torch.cat(blocks, 2)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "left": 2, "right": 0},
    {"left": 1, "right": 2},
    {"softcap": 2.0, "scale": 0.7},
    {"causal": True, "slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    {"causal": True, "softcap": 3.0, "left": 3, "scale": 1.3},
]


@pytest.mark.parametrize("how", VARIANTS)
@pytest.mark.parametrize(("queries", "keys", "groups"), [(5, 5, 4), (3, 6, 2)])
def test_scores_are_those_of_the_definition(
    how: dict[str, Any], queries: int, keys: int, groups: int
) -> None:
    q, k = seeded(2, queries, 4, 8), seeded(2, keys, groups, 8, seed=1)
    call = kernel_call(Caller(), {"q": q, "k": k, "v": k, **how})
    expected = torch.stack([scores_of_one(q[b], k[b], **how) for b in range(2)])
    torch.testing.assert_close(whole(call), expected.float(), **CLOSE)


@pytest.mark.parametrize("how", VARIANTS)
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("lengths", [((3, 1, 4), (3, 1, 4)), ((2, 1, 3), (4, 3, 3))])
def test_a_pack_is_read_by_document(
    how: dict[str, Any],
    padding: int,
    lengths: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a padded batch, and, where that would be large, as one masked sequence."""
    monkeypatch.setattr(fused_kernels, "MOST_PADDING", padding)
    starts = [torch.tensor([0, *x]).cumsum(0).int() for x in lengths]
    q = seeded(sum(lengths[0]) + 1, 4, 8)  # one token behind the last document
    k = seeded(sum(lengths[1]) + 1, 2, 8, seed=1)
    same = lengths[0] == lengths[1]
    given = {"starts_q": starts[0], "starts_k": starts[0 if same else 1]}
    given |= {"longest_q": max(lengths[0]), "longest_k": max(lengths[1])}
    call = kernel_call(Caller(), {"q": q, "k": k, "v": k, **given, **how})
    z = whole(call)
    for n, (a, b) in enumerate(zip(*lengths, strict=True)):
        i, j = int(starts[0][n]), int(starts[1][n])
        mine = z[n, :, :a, :b] if padding else z[0, :, i : i + a, j : j + b]
        expected = scores_of_one(q[i : i + a], k[j : j + b], **how)
        torch.testing.assert_close(mine, expected.float(), **CLOSE)
    shown = (z > -math.inf) & call.counted_BQ()[:, None, :, None]  # no padding's rows
    assert shown.sum() == sum(
        (scores_of_one(q[:a], k[:b], **how) > -math.inf).sum()
        for a, b in zip(*lengths, strict=True)
    )


def test_a_sink_is_a_column_without_a_token() -> None:
    q, sinks = seeded(1, 4, 2, 8), torch.tensor([0.5, -1.0])
    call = kernel_call(
        Caller(), {"q": q, "k": q, "v": q, "causal": True, "sinks": sinks}
    )
    z = whole(call)
    assert call.extra_keys == 1 and bool(call.counted_BQ().all())
    assert z[0, :, :, -1].tolist() == [[0.5] * 4, [-1.0] * 4]
    expected = scores_of_one(q[0], q[0], causal=True)
    torch.testing.assert_close(z[0, :, :, :-1], expected.float(), **CLOSE)


@pytest.mark.parametrize("name", ["block_table", "seqused_k", "qv", "attention_chunk"])
def test_what_changes_the_rows_otherwise_is_refused_by_name(name: str) -> None:
    q = seeded(1, 3, 2, 8)
    with pytest.raises(fused_kernels.NotReadError, match=name):
        kernel_call(Caller(), {"q": q, "k": q, "v": q, name: 3})


@pytest.mark.parametrize("reader", ["_sage", "_transformer_engine"])
def test_a_causal_mask_that_each_aligns_in_its_way_is_refused(reader: str) -> None:
    """Over other keys than queries Transformer Engine starts at the upper left."""
    q, k = seeded(1, 3, 2, 8), seeded(1, 5, 2, 8)
    given = {"module": DotProductAttention(), "qkv_format": "bshd", "causal": True}
    given |= {"q": q, "k": k, "v": k, "tensor_layout": "NHD"}
    read = getattr(kernel_functions, reader)
    with pytest.raises(fused_kernels.NotReadError, match="causal"):
        read(Caller(), given)
    assert read(Caller(), {**given, "k": q, "v": q}).causal


class Site(nn.Module):
    """Attention by a function that is given (B, S, H, D)."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.v_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (2, 8)) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        out: Tensor = self.o_proj(self.attend(q, k, v).reshape(x.shape))
        return out


def read(model: nn.Module, *args: Any, **kwargs: Any) -> list[AttentionCall]:
    found: list[AttentionCall] = []
    with torch.no_grad(), Interceptor(anatomy_of(model), found.append) as interceptor:
        model(*args, **kwargs)
    assert not interceptor.gaps.unread, interceptor.gaps.unread
    return found


def expected_of(site: Site, x: Tensor) -> Tensor:
    q, k = (f(x).unflatten(-1, (2, 8)) for f in (site.q_proj, site.k_proj))
    scores = [scores_of_one(q[b], k[b], causal=True) for b in range(len(x))]
    return torch.stack(scores).float()


@pytest.mark.needs("flash-attn")
@pytest.mark.parametrize(
    "form",
    ["plain", "qkvpacked", "kvpacked", "varlen", "varlen qkvpacked", "varlen kvpacked"],
)
def test_flash_attns_own_functions_are_read(form: str) -> None:
    flash = flash_attn()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if form == "plain":
            return flash.flash_attn_func(q, k, v, causal=True)
        if form == "qkvpacked":
            packed = torch.stack((q, k, v), 2)
            return flash.flash_attn_qkvpacked_func(packed, causal=True)
        if form == "kvpacked":
            both = torch.stack((k, v), 2)
            return flash.flash_attn_kvpacked_func(q, both, causal=True)
        starts = torch.arange(0, 11, 5, dtype=torch.int32)
        flat = [y.flatten(0, 1) for y in (q, k, v)]
        if form == "varlen qkvpacked":
            packed = torch.stack(flat, 1)
            return flash.flash_attn_varlen_qkvpacked_func(
                packed, starts, 5, causal=True
            )
        ends = (starts, starts, 5, 5)
        if form == "varlen kvpacked":
            both = torch.stack(flat[1:], 1)
            return flash.flash_attn_varlen_kvpacked_func(
                flat[0], both, *ends, causal=True
            )
        return flash.flash_attn_varlen_func(*flat, *ends, causal=True)

    site, x = Site(attend), seeded(2, 5, 16)
    (call,) = read(site, x)
    assert call.module is site
    torch.testing.assert_close(whole(call), expected_of(site, x), **CLOSE)


_HALF = """Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None,
 Tensor? {qv}=None, Tensor? out=None, Tensor? cu_seqlens_q=None,
 Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None,
 Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,
 Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None,
 Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None,
 Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None,
 float? softmax_scale=None, bool {causal}=False, int window_size_left=-1,
 int window_size_right=-1, int attention_chunk=0, float softcap=0.0,
 bool rotary_interleaved=True, Tensor? scheduler_metadata=None, int num_splits=1,
 bool? pack_gqa=None, int sm_margin=0"""


def third(name: str, **words: str) -> Any:
    """flash-attn 3's operator of that name, with the arguments it documents."""
    if not hasattr(torch.ops.flash_attn_3, name):
        schema = _HALF.replace("\n", "").format(**words)
        torch.library.define(f"flash_attn_3::{name}", f"({schema}) -> Tensor")

        def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **how: Any) -> Tensor:
            if q.ndim == 4:
                return dense(q, k, v, 8**-0.5, True)
            turned = (x.unflatten(0, (2, 5)) for x in (q, k, v))
            return dense(*turned, 8**-0.5, True).flatten(0, 1)

        torch.library.impl(f"flash_attn_3::{name}", "cpu", kernel)
    return getattr(torch.ops.flash_attn_3, name)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["_flash_attn_forward", "fwd"])
def test_the_operators_of_flash_attn_3_are_read(name: str, packed: bool) -> None:
    """By their published arguments: version 3 is built for one kind of GPU."""
    causal = "causal" if name == "_flash_attn_forward" else "is_causal"
    run = third(
        name, qv="qv" if name == "_flash_attn_forward" else "q_v", causal=causal
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        how: dict[str, Any] = {causal: True}
        if packed:
            starts = torch.arange(0, 11, 5, dtype=torch.int32)
            how |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
            how |= {"max_seqlen_q": 5, "max_seqlen_k": 5}
            q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        return run(q, k, v, **how)

    site, x = Site(attend), seeded(2, 5, 16)
    (call,) = read(site, x)
    torch.testing.assert_close(whole(call), expected_of(site, x), **CLOSE)


class Lengths:
    """xFormers' ``_SeqLenInfo``: where blocks start, and the longest."""

    def __init__(self, *lengths: int) -> None:
        self.seqstart = torch.tensor([0, *lengths]).cumsum(0).int()
        self.max_seqlen = max(lengths)


def bias(name: str, **fields: Any) -> Any:
    """A bias of xFormers by its published fields; only some can be written out."""
    return type(name, (), fields)()


def _square(rows: int, keys: int) -> dict[str, Any]:
    infos = Lengths(3, rows - 3), Lengths(4, keys - 4)
    return {"q_seqinfo": infos[0], "k_seqinfo": infos[rows != keys]}


LOCAL, LEFT = "LocalAttentionFromBottomRightMask", {"window_left": 2, "window_right": 1}
CAUSAL = {"causal": True}
BIASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    # fields, what the definition is given, keys beside five queries
    "LowerTriangularMask": ({}, CAUSAL, 5),
    "LowerTriangularFromBottomRightMask": ({}, CAUSAL, 7),
    LOCAL: (LEFT, {"left": 2, "right": 1}, 7),
    "BlockDiagonalMask": (_square(5, 7), {}, 7),
    "BlockDiagonalCausalMask": (_square(5, 5), CAUSAL, 5),
    "BlockDiagonalCausalFromBottomRightMask": (_square(5, 7), CAUSAL, 7),
}


@pytest.mark.parametrize("name", BIASES)
def test_biases_of_xformers_that_hide_by_place_are_not_written_out(name: str) -> None:
    """By their published fields; a pack of two is one batch of one sequence."""
    fields, how, keys = BIASES[name]
    q, k = seeded(1, 5, 2, 8), seeded(1, keys, 2, 8, seed=1)
    given = {"q": q, "k": k, "v": k, "attn_bias": bias(name, **fields), "scale": 0.7}
    z = whole(kernel_functions._xformers(Caller(), given))
    if not name.startswith("Block"):
        expected = scores_of_one(q[0], k[0], scale=0.7, **how)
        torch.testing.assert_close(z[0], expected.float(), **CLOSE)
        return
    at = [fields[f"{x}_seqinfo"].seqstart.tolist() for x in "qk"]
    for n in range(2):
        i, j = (slice(x[n], x[n + 1]) for x in at)
        expected = scores_of_one(q[0, i], k[0, j], scale=0.7, **how)
        found = z[n, :, : expected.shape[1], : expected.shape[2]]
        torch.testing.assert_close(found, expected.float(), **CLOSE)


def test_other_biases_are_written_out_or_refused() -> None:
    q, k = seeded(1, 5, 2, 8), seeded(1, 7, 2, 8, seed=1)
    given = {"q": q, "k": k, "v": k}
    upper = {**given, "attn_bias": LowerTriangularMask()}  # 5 of 7 from the upper left
    z = whole(kernel_functions._xformers(Caller(), upper))
    shown = torch.ones(5, 7, dtype=torch.bool).tril()
    assert torch.equal(z[0, 0] > -math.inf, shown)
    with pytest.raises(fused_kernels.NotReadError, match="Paged"):
        paged = {**given, "attn_bias": bias("PagedBlockDiagonalPaddedKeysMask")}
        kernel_functions._xformers(Caller(), paged)


def _as_published() -> dict[str, Any]:
    """Functions of packages that need a GPU, with the signatures they document."""

    def sageattn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: float | None = None,
        return_lse: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return dense(*turned, 8**-0.5, is_causal).transpose(1, 2)

    def memory_efficient_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Any = None,
        p: float = 0.0,
        scale: float | None = None,
        *,
        op: Any = None,
        output_dtype: Any = None,
    ) -> Tensor:
        return dense(query, key, value, 8**-0.5, attn_bias is not None)

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
    ) -> Tensor:
        return dense(q, k, v, 8**-0.5, causal)

    return {
        "sageattention": sageattn,
        "xformers.ops": memory_efficient_attention,
        "flash_attn.cute": flash_attn_func,
    }


class LowerTriangularMask:
    """As xFormers' bias of that name: it can be written out."""

    def materialize(
        self, shape: tuple[int, ...], dtype: Any = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        return torch.full(shape, -math.inf, dtype=dtype, device=device).triu(1)


@pytest.mark.parametrize("package", _as_published())
def test_functions_that_no_operator_shows_are_read(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their published signatures: the packages do not import without a GPU."""
    function = _as_published()[package]
    module = ModuleType(package)
    setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, package, module)
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "kernel", function, raising=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        kernel = here.kernel  # type: ignore[attr-defined]
        if package == "sageattention":
            turned = (x.transpose(1, 2) for x in (q, k, v))
            return kernel(*turned, is_causal=True).transpose(1, 2)
        if package == "xformers.ops":
            return kernel(q, k, v, attn_bias=LowerTriangularMask())
        return kernel(q, k, v, causal=True)

    site, x = Site(attend), seeded(2, 5, 16)
    (call,) = read(site, x)
    torch.testing.assert_close(whole(call), expected_of(site, x), **CLOSE)
    assert here.kernel is function  # type: ignore[attr-defined]
    assert getattr(module, function.__name__) is function


class DotProductAttention(nn.Module):
    """Transformer Engine's signature, as published."""

    softmax_scale, attn_mask_type, qkv_format = 8**-0.5, "causal", "sbhd"

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        attn_mask_type: str | None = None,
    ) -> Tensor:
        given = (query_layer, key_layer, value_layer)
        turned = (x.transpose(0, 1) for x in given)
        return dense(*turned, self.softmax_scale, True).transpose(0, 1)


DotProductAttention.__module__ = "transformer_engine.pytorch.attention"


class Engine(Site):
    def __init__(self, **options: Any) -> None:
        super().__init__(None)
        self.core, self.options = DotProductAttention(), options
        self.attend = self.turned

    def turned(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = (x.transpose(0, 1) for x in (q, k, v))
        out: Tensor = self.core(*given, **self.options).transpose(0, 1)
        return out


def test_transformer_engines_module_is_read_or_refused() -> None:
    site, x = Engine(), seeded(2, 5, 16)
    (call,) = read(site, x)
    torch.testing.assert_close(whole(call), expected_of(site, x), **CLOSE)
    assert not site.core._forward_hooks
    refused = Engine(attn_mask_type="arbitrary")
    with torch.no_grad(), Interceptor(anatomy_of(refused), lambda call: None) as seen:
        refused(x)
    assert any("arbitrary" in why.detail for why in seen.gaps.unread.values())


@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
def test_transformer_engines_packs_are_read_by_document(kind: str) -> None:
    q, starts = seeded(9, 2, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    given = {"module": DotProductAttention(), "q": q, "k": q, "v": q}
    given |= {"qkv_format": "thd", "attn_mask_type": kind}
    given |= {"starts_q": starts, "starts_k": starts, "longest_q": 5, "longest_k": 5}
    z = whole(kernel_functions._transformer_engine(Caller(), given))
    for n, part in enumerate((slice(0, 4), slice(4, 9))):
        how = {"causal": "causal" in kind}
        expected = scores_of_one(q[part], q[part], **how)
        found = z[n, :, : expected.shape[1], : expected.shape[2]]
        torch.testing.assert_close(found, expected.float(), **CLOSE)
    refused = {"cu_seqlens_q_padded": starts}
    if "causal" in kind:  # each aligns the diagonal in its way
        refused = {"starts_k": starts.clone()}
    with pytest.raises(fused_kernels.NotReadError):
        kernel_functions._transformer_engine(Caller(), {**given, **refused})


def readings(model: nn.Module, path: Path, **batch: Tensor) -> dict[str, Any]:
    """Return what one sampled pass reads of attention, by quantity and site."""
    with equipoise.watch(model, run=path, every=1, quiet=True) as handle:
        model(**batch)
        handle.step()
    assert not handle.findings, handle.findings
    run = equipoise.open_run(path)
    return {
        quantity: {
            site: v.ravel().tolist() for site, (_, v) in run.series(quantity).items()
        }
        for quantity in run.quantities
        if quantity.startswith("attention.")
    }


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A Llama with grouped queries that Hugging Face runs by flash-attn."""
    from transformers import modeling_flash_attention_utils as utils

    flash_attn()
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: True)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn"):
        monkeypatch.setattr(utils, name, None)
    return next(s for s in SPECIMENS if s.name == "LlamaForCausalLM").build("sdpa")


def _by(model: nn.Module, implementation: str) -> nn.Module:
    model.config._attn_implementation = implementation  # type: ignore[union-attr]
    return model


@pytest.mark.needs("flash-attn")
@pytest.mark.parametrize("padding", ["", "right", "left"])
def test_hugging_faces_flash_attention_reads_as_sdpa(
    padding: str, llama: nn.Module, tmp_path: Path
) -> None:
    batch = {"input_ids": torch.arange(14).reshape(2, 7) % 11}
    if padding:
        second = [1] * 5 + [0] * 2 if padding == "right" else [0] * 2 + [1] * 5
        batch["attention_mask"] = torch.tensor([[1] * 7, second])
    by_sdpa = readings(_by(llama, "sdpa"), tmp_path / "a.eqp", **batch)
    flash = _by(llama, "flash_attention_2")
    by_flash = readings(flash, tmp_path / "b.eqp", **batch)
    by_sdpa.pop("attention.rows_left_out")  # a pack has no rows of padding
    by_flash.pop("attention.rows_left_out")
    assert by_flash == _near(by_sdpa)


@pytest.mark.needs("flash-attn")
def test_padding_free_documents_read_as_padded_ones(
    llama: nn.Module, tmp_path: Path
) -> None:
    """Positions that restart are documents: no row sees another's keys."""
    ids = torch.arange(12) % 11
    pack = {
        "input_ids": ids[None],
        "position_ids": torch.tensor([[*range(7), *range(5)]]),
    }
    padded = {
        "input_ids": torch.stack((ids[:7], F.pad(ids[7:], (0, 2)))),
        "attention_mask": torch.tensor([[1] * 7, [*[1] * 5, 0, 0]]),
    }
    flash = _by(llama, "flash_attention_2")
    packed = readings(flash, tmp_path / "a.eqp", **pack)
    expected = readings(_by(llama, "sdpa"), tmp_path / "b.eqp", **padded)
    for found in (packed, expected):
        found.pop("attention.rows_left_out")
    assert packed == _near(expected)


def _near(readings: dict[str, Any]) -> dict[str, Any]:
    return {
        quantity: {s: pytest.approx(v, rel=1e-5, abs=1e-5) for s, v in sites.items()}
        for quantity, sites in readings.items()
    }


@pytest.mark.needs("flash-attn")
@pytest.mark.parametrize(
    "name",
    ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn3"],
)
def test_a_kernel_of_the_hub_is_read_from_the_registrys_arguments(
    name: str, llama: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operators have names of their own, and arguments without names."""
    from transformers import modeling_flash_attention_utils as utils
    from transformers.integrations import flash_attention
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def hub(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return dense(q, k, v, 8**-0.5, True)

    calls = ((hub, None, None, None, None), (lambda **given: {}, None))
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *a: calls)
    masks = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(masks, name, masks["flash_attention_2"])
    mapping = ALL_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(mapping, name, flash_attention.flash_attention_forward)
    registered = dict(mapping)
    batch = {"input_ids": torch.arange(7)[None]}
    by_sdpa = readings(_by(llama, "sdpa"), tmp_path / "a.eqp", **batch)
    by_hub = readings(_by(llama, name), tmp_path / "b.eqp", **batch)
    assert by_hub == _near(by_sdpa)
    assert dict(ALL_ATTENTION_FUNCTIONS._global_mapping) == registered
    assert registered[name] is flash_attention.flash_attention_forward


@pytest.mark.needs("flash-attn")
def test_training_by_flash_attn_is_unchanged(tmp_path: Path) -> None:
    flash = flash_attn()

    def losses(run: Path | None) -> list[float]:
        torch.manual_seed(0)
        model = Site(lambda q, k, v: flash.flash_attn_func(q, k, v, causal=True))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if run is not None:
            equipoise.watch(model, optimizer, run=run, every=2, quiet=True)
        found = []
        for step in range(5):
            loss = model(seeded(2, 5, 16, seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    path = tmp_path / "a.eqp"
    assert losses(path) == losses(None)
    theta = equipoise.open_run(path).series("attention.theta.p50")
    assert [list(steps) for steps, _ in theta.values()] == [[0, 2, 4]]
