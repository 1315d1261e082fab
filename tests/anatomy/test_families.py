"""Declarations: the tables' matrices are the ones the models use; outsiders can add."""

import importlib.metadata
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import entmax
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from equipoise.anatomy import families
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.families import FAMILIES, Block, Separate, advice, family
from equipoise.anatomy.hooks import before
from equipoise.anatomy.interception import Interceptor
from equipoise.anatomy.sites import Anatomy, AttentionSite
from equipoise.errors import InputError
from tests.zoo.specimens import GROUPED, SIZES, SPECIMENS

NO_ROTATION = ("GPT2LMHeadModel", "BertModel", "AlbertModel", "ViTModel", "nanoGPT")
NO_ROTATION += ("BloomForCausalLM", "T5ForConditionalGeneration", "DistilBertModel")
NO_ROTATION += ("nn.TransformerEncoder",)


@pytest.mark.parametrize("name", NO_ROTATION)
def test_projections_make_the_scores(name: str) -> None:
    """q kᵀ from the declared matrices and the module's input, biases set to zero."""
    specimen = next(s for s in SPECIMENS if s.name == name)
    model = specimen.build(specimen.implementations[0])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") and "relative" not in key:
                parameter.zero_()
    anatomy = anatomy_of(model)
    site = anatomy.attention[0]
    assert site.projections is not None
    inputs, found = _first(anatomy, site, specimen.batch())
    q, k = (
        torch.einsum("btc,hdc->bhtd", inputs, site.projections.by_head(letter))
        for letter in ("q", "k")
    )
    scale = found.scale if found.q_BHQD is not None else q.shape[-1] ** -0.5
    if found.q_BHQD is not None and found.k_BGKD is not None:
        torch.testing.assert_close(found.q_BHQD, q, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.k_BGKD, k, rtol=1e-4, atol=1e-5)
    else:  # Bloom adds its slopes to the scores: they are alike in every row
        (_, read), *_ = found.blocks()
        rest = read[0, :, -1] - (q @ k.mT)[0, :, -1] * scale
        steps = rest.diff(dim=-1)
        torch.testing.assert_close(steps, steps[..., :1].expand_as(steps))


def _first(anatomy: Anatomy, site: AttentionSite, batch: Any) -> tuple[Tensor, Any]:
    calls: list[Any] = []
    inputs: list[Tensor] = []

    def listen(module: nn.Module, args: Any, kwargs: Any) -> None:
        values = (*args, *kwargs.values())
        inputs.append(next(v for v in values if isinstance(v, Tensor)))

    handle = before(site.module, listen)
    with torch.no_grad(), Interceptor(anatomy, calls.append):
        anatomy.model(**batch)
    handle.remove()
    return inputs[0], calls[0]


def test_neox_rows_go_head_by_head() -> None:
    specimen = next(s for s in SPECIMENS if s.name == "GPTNeoXForCausalLM")
    site = anatomy_of(specimen.build("sdpa")).attention[0]
    assert site.projections is not None
    fused = site.module.get_parameter("query_key_value.weight").detach()
    for index, letter in enumerate("qkv"):
        by_head = site.projections.by_head(letter)  # type: ignore[arg-type]
        assert torch.equal(by_head, fused.view(4, 3, 8, 32)[:, index])


def test_grouped_heads_read_their_own_keys() -> None:
    specimen = next(s for s in SPECIMENS if s.name == "LlamaForCausalLM")
    projections = anatomy_of(specimen.build("sdpa")).attention[0].projections
    assert projections is not None and (projections.heads, projections.kv_heads) == (
        4,
        2,
    )
    k = projections.k.matrix().view(2, 8, 32)
    assert torch.equal(projections.by_head("k"), k[[0, 0, 1, 1]])
    o = projections.by_head("o")
    assert torch.equal(o[1], projections.o.matrix()[:, 8:16].mT)


def test_shared_queries_and_keys() -> None:
    specimen = next(s for s in SPECIMENS if s.name == "lab GPT")
    projections = anatomy_of(specimen.build("shared")).attention[0].projections
    assert projections is not None and projections.q == projections.k


PLACEMENTS = {
    "LlamaForCausalLM": "pre",
    "BertModel": "post",
    "Gemma2ForCausalLM": "sandwich",
    "nn.TransformerEncoder": "post",
    "nanoGPT": "pre",
    "BartModel": "post",
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_where_the_norms_stand(name: str) -> None:
    specimen = next(s for s in SPECIMENS if s.name == name)
    anatomy = anatomy_of(specimen.build(specimen.implementations[0]))
    assert anatomy.placement == PLACEMENTS[name]
    assert "where the norms stand" not in anatomy.guessed


def test_routers_and_both_stacks() -> None:
    routed = next(s for s in SPECIMENS if s.name == "MixtralForCausalLM").build("sdpa")
    assert {n: r.picks for n, r in anatomy_of(routed).routers.items()} == {
        "model.layers.0.mlp.gate": 2,
        "model.layers.1.mlp.gate": 2,
    }
    t5 = next(s for s in SPECIMENS if s.name.startswith("T5")).build("sdpa")
    blocks = list(anatomy_of(t5).blocks)
    stacks = [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in (0, 1)]
    assert blocks == stacks


def test_a_query_map_that_holds_a_gate_too() -> None:
    """Qwen3-Next: a scaled gate must not move W_Q, a scaled query must."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        **{**SIZES, **GROUPED, "num_hidden_layers": 4},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
    )
    model = transformers.Qwen3NextForCausalLM(config)
    (site,) = anatomy_of(model).attention
    maps = site.projections
    assert maps is not None and (maps.heads, maps.kv_heads) == (4, 2)
    stored = site.module.q_proj.weight.detach().view(4, 2, 8, -1)
    queries = stored[:, 0].flatten(0, 1).clone()
    torch.testing.assert_close(maps.q.matrix(), queries)
    stored[:, 1] *= 8
    torch.testing.assert_close(maps.q.matrix(), queries)
    stored[:, 0] *= 8
    torch.testing.assert_close(maps.q.matrix(), 8 * queries)


class Wider(nn.Module):
    """A map for queries that holds more than queries, in an order nobody declared."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.o_proj = nn.Linear(32, rows), nn.Linear(32, 32)
        self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 32)


def test_a_query_map_of_unknown_content_is_not_read() -> None:
    plain = anatomy_of(nn.Sequential(Wider(32))).attention[0]
    assert plain.projections is not None
    assert anatomy_of(nn.Sequential(Wider(64))).attention[0].projections is None


def test_lora_reads_base_and_adapter_under_the_users_names() -> None:
    specimen = next(s for s in SPECIMENS if s.name == "LlamaForCausalLM")
    plain = specimen.build("sdpa")
    names = [site.name for site in anatomy_of(plain).attention]
    options = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    model = get_peft_model(plain, options)
    site = anatomy_of(model).attention[0]
    assert [s.name for s in anatomy_of(model).attention] == names
    assert site.declared and site.projections is not None
    x = torch.randn(3, 32)
    q_proj = site.module.get_submodule("q_proj").eval()
    truth = q_proj(x).detach()
    torch.testing.assert_close(x @ site.projections.q.matrix().mT, truth)
    model.merge_adapter()  # type: ignore[operator]
    torch.testing.assert_close(x @ site.projections.q.matrix().mT, truth)
    with model.disable_adapter():
        base = q_proj(x).detach()
        torch.testing.assert_close(x @ site.projections.q.matrix().mT, base)
    assert not torch.allclose(base, truth)


class Mine(nn.Module):
    """Attention whose maps no guess would find."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        for name in ("ask", "offer", "carry", "give"):
            setattr(self, name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x)[:, None] for m in (self.ask, self.offer, self.carry))
        out: Tensor = self.give(F.scaled_dot_product_attention(q, k, v)[:, 0])
        return out


def test_a_decorator_adds_a_family() -> None:
    assert not anatomy_of(Mine()).attention

    @family("Mine")
    def mine() -> Separate:
        return Separate(q="ask", k="offer", v="carry", o="give")

    try:
        (site,) = anatomy_of(Mine()).attention
        assert site.declared and site.projections is not None
    finally:
        del FAMILIES["Mine"]


def test_an_entry_point_adds_a_family(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    class Point:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> None:
            if self.name == "broken":
                raise ImportError("no such package")
            family("Mine")(lambda: Block(feedforward=("give",), placement="pre"))

    points = [Point("good"), Point("broken")]
    monkeypatch.setattr(families, "entry_points", lambda group: points)
    families.load_entry_points.cache_clear()
    with caplog.at_level(logging.WARNING, "equipoise"):
        assert families.declared("Mine")
    assert "broken" in caplog.text
    del FAMILIES["Mine"]
    families.load_entry_points.cache_clear()
    assert importlib.metadata.entry_points(group=families.GROUP) is not None


def test_a_wrong_declaration_says_what_to_write() -> None:
    with pytest.raises(InputError, match='@family\\("Mine"\\)'):
        family("Mine")(lambda: "wq, wk")  # type: ignore[arg-type,return-value]
    assert "LlamaAttention" in advice("Mine")


def test_a_declaration_that_does_not_fit_is_not_about_this_class() -> None:
    class LlamaAttention(Mine):
        pass

    assert not anatomy_of(LlamaAttention()).attention


def test_for_undeclared_models_the_guesses_are_listed() -> None:
    config = transformers.PhiConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
    )
    anatomy = anatomy_of(transformers.PhiForCausalLM(config))
    assert "blocks of the residual stream" in anatomy.guessed
    assert list(anatomy.blocks) == ["model.layers.0", "model.layers.1"]
    assert all(s.projections for s in anatomy.attention)


class Packed(nn.Module):
    """Two codes of four bits in a byte, as quantised models keep their weights."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.zeros(32, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)


class Adapted(nn.Module):
    """LoRA over a packed weight."""

    merged = disable_adapters = False
    active_adapters = ("mine",)

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = Packed()
        self.lora_A = nn.ModuleDict({"mine": nn.Linear(8, 2)})

    def get_delta_weight(self, adapter: str) -> Tensor:
        return torch.zeros(8, 8)


@pytest.mark.parametrize("kind", [Packed, Adapted])
def test_packed_weights_are_a_site_without_projections(kind: type[nn.Module]) -> None:
    model = nn.Module()
    model.num_heads = 2
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        model.add_module(name, kind())
    (site,) = anatomy_of(model).attention
    assert site.projections is None


def _relu2(z: Tensor) -> Tensor:
    return F.relu(z).square() / z.shape[-1]


OTHERS = {"sigmoid": torch.sigmoid, "relu2": _relu2, "sparsemax": entmax.sparsemax}


class OtherAttention(nn.Module):
    """Causal attention whose weights are no softmax."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(8, 8) for _ in range(4))
        self.by, self.num_heads = by, 2

    def weights(self, x: Tensor) -> Tensor:
        q, k = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.wq, self.wk))
        z = q @ k.mT
        hidden = torch.ones(z.shape[-2:], dtype=torch.bool).triu(1)
        made: Tensor = OTHERS[self.by](z.masked_fill(hidden, -1e9))
        return made

    def forward(self, x: Tensor) -> Tensor:
        v = self.wv(x).unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = self.weights(x) @ v
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


@pytest.fixture(params=sorted(OTHERS))
def other(request: pytest.FixtureRequest) -> Iterator[OtherAttention]:
    """A module that a family declares, with its kind of weights."""

    @family("OtherAttention")
    def mine() -> Separate:
        return Separate(q="wq", k="wk", v="wv", o="wo", weights=request.param)

    torch.manual_seed(0)
    yield OtherAttention(request.param)
    del FAMILIES["OtherAttention"]


def test_declared_weights_are_read_as_shares_of_their_row(
    other: OtherAttention,
) -> None:
    """Of two passes each is read once, and a product of q and k is not taken for it."""
    x, found = torch.randn(3, 5, 8), []
    with torch.no_grad(), Interceptor(anatomy_of(other), found.append) as seen:
        other(x)
        other(x)
    assert not seen.gaps.unread and len(found) == 2
    w = other.weights(x).detach()
    shares = w / w.sum(-1, keepdim=True).clamp(min=1e-30)
    for call in found:
        assert call.module is other and call.shape == (3, 2, 5, 5)
        read = call.scores(slice(0, 5)).softmax(-1).nan_to_num()
        torch.testing.assert_close(read, shares, rtol=1e-5, atol=1e-6)


def test_what_only_a_softmax_has_is_named(
    other: OtherAttention, tmp_path: Path
) -> None:
    path = tmp_path / "a.eqp"
    with equipoise.watch(other, run=path, every=1, quiet=True) as handle:
        other(torch.randn(3, 5, 8))
        handle.step()
    codes = [f.code for f in handle.findings]
    assert codes.count("watch.unread.no_softmax") == 1
    quantities = equipoise.open_run(path).quantities
    assert "attention.theta.p50" in quantities and "attention.entropy" in quantities
    absent = ("attention.max_logit", "projection.G", "sensitivity.S")
    assert not {*absent, "precision.kappa_softmax"} & {*quantities}


def test_weights_that_no_one_knows_are_refused() -> None:
    with pytest.raises(InputError, match="tanh.*sigmoid"):

        @family("OtherAttention")
        def mine() -> Separate:
            weights: Any = "tanh"
            return Separate(q="wq", k="wk", v="wv", o="wo", weights=weights)


def test_undeclared_weights_are_not_guessed() -> None:
    found: list[Any] = []
    model = OtherAttention("sigmoid")
    with torch.no_grad(), Interceptor(anatomy_of(model), found.append):
        model(torch.randn(3, 5, 8))
    assert not found
