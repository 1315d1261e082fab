"""A normaliser is swapped into a user's model, learnt there, and undone."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from equipoise.errors import InputError
from equipoise.numerics.normalisers import NORMALISERS
from equipoise.remedies.base import Remedy
from equipoise.remedies.normaliser import (
    LEARNABLE,
    NormaliserModule,
    NormaliserSwap,
    SoftmaxReplacement,
    learnt_parameters,
)
from tests.models import GPT, GPTConfig

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
HUGGING = [
    f"{kind}-{way}" for kind in ("gpt2", "llama", "bert") for way in ("eager", "sdpa")
]
NAMES = [*HUGGING, "torch", "lab"]
X = torch.arange(12)[None] + torch.tensor([[3], [7]])
SEEN = torch.tensor([[1] * 12, [1] * 8 + [0] * 4])


def a_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, _, way = name.partition("-")
    model: nn.Module
    match kind:
        case "gpt2":
            config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64)
            model = GPT2LMHeadModel._from_config(config, attn_implementation=way)
        case "llama":
            config = LlamaConfig(**SIZES, num_key_value_heads=1)
            model = LlamaForCausalLM._from_config(config, attn_implementation=way)
        case "bert":
            config = BertConfig(**SIZES)
            model = BertModel._from_config(config, attn_implementation=way)
        case "torch":
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        case _:
            model = GPT(GPTConfig(width=16, depth=2, heads=2, vocabulary=64))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)  # so that attention is far from uniform
    return model.eval()


def answers(model: nn.Module) -> Tensor:
    """Return what the model says at tokens that are no padding."""
    if isinstance(model, nn.TransformerEncoder):
        x = F.one_hot(X % 16, 16).float()
        found: Tensor = model(x, src_key_padding_mask=SEEN == 0)
        return found[SEEN.bool()]
    if isinstance(model, GPT):
        return model(X).flatten(0, 1)
    out = model(input_ids=X, attention_mask=SEEN)
    logits: Tensor = out[0]
    return logits[SEEN.bool()]


@pytest.mark.parametrize("name", NAMES)
def test_softmax_in_the_place_of_softmax_changes_nothing(name: str) -> None:
    """Hidden keys stay hidden, whichever number the model hides them with."""
    model = a_model(name)
    before = answers(model)
    NormaliserSwap(to="softmax").apply(model)
    # Written-out attention rounds in another order than the fused kernel.
    torch.testing.assert_close(answers(model), before, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_applied_and_undone(name: str) -> None:
    model = a_model(name)
    before, state = answers(model), copy.deepcopy(model.state_dict())
    undo = NormaliserSwap(to="sparsemax").apply(model)
    assert (answers(model) - before).abs().max() > 1e-3
    undo()
    assert torch.equal(answers(model), before)
    assert list(model.state_dict()) == list(state)
    assert [n for n, _ in model.named_modules()] == [
        n for n, _ in a_model(name).named_modules()
    ]


@pytest.mark.parametrize("way", ["eager", "sdpa"])
@pytest.mark.parametrize("to", sorted(NORMALISERS))
def test_padding_and_future_keys_do_not_matter(to: str, way: str) -> None:
    """A causal model's first answer is that of the first token alone: n counts."""
    model = a_model(f"llama-{way}")
    NormaliserSwap(to=to).apply(model)
    whole = model(input_ids=X, attention_mask=SEEN).logits
    short = model(input_ids=X[:, :5]).logits
    torch.testing.assert_close(whole[:, :5], short, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-eager", "torch", "lab"])
@pytest.mark.parametrize("to", sorted(LEARNABLE))
def test_parameters_are_learnt_per_head(to: str, name: str) -> None:
    model = a_model(name)
    count = len(list(model.parameters()))
    undo = NormaliserSwap(to=to, learn=True).apply(model)
    learnt = learnt_parameters(model)
    assert len(learnt) == 2 * len(LEARNABLE[to].start)
    assert {tuple(p.shape) for p in learnt} == {(2,)}
    answers(model).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learnt)
    if to != "adaptive-temperature":  # β may rest at 1, where nothing moves it
        assert all(p.grad is not None and (p.grad != 0).any() for p in learnt)
    undo()
    assert learnt_parameters(model) == [] and len(list(model.parameters())) == count


@pytest.mark.parametrize("to", sorted(LEARNABLE))
def test_learning_starts_near_the_fixed_one(to: str) -> None:
    z = torch.randn(3, 4, 5, 7, generator=torch.Generator().manual_seed(1))
    fixed = {"sink": "softmax1", "entmax": "entmax15"}.get(to, to)
    # α starts at 1.505, not at 1.5.
    torch.testing.assert_close(
        NormaliserModule(to, heads=4)(z),
        NormaliserModule(fixed)(z),
        rtol=0.02,
        atol=5e-3,
    )
    folded = NormaliserModule(to, heads=4)(z.flatten(0, 1)).view_as(z)
    assert torch.equal(folded, NormaliserModule(to, heads=4)(z))


def test_each_head_has_its_own() -> None:
    module, z = NormaliserModule("sink", heads=2), torch.zeros(1, 2, 1, 3)
    with torch.no_grad():
        module.b.copy_(torch.tensor([0.0, 50.0]))  # type: ignore[operator]
    total = module(z).sum(-1).flatten()
    torch.testing.assert_close(total, torch.tensor([0.75, 0.0]))


def test_an_optimiser_takes_what_is_learnt() -> None:
    model = a_model("gpt2-eager").train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    NormaliserSwap(to="entmax", learn=True).apply(model)
    optimiser.add_param_group({"params": learnt_parameters(model), "weight_decay": 0})
    before = [p.detach().clone() for p in learnt_parameters(model)]
    model(input_ids=X, labels=X).loss.backward()
    optimiser.step()
    after = learnt_parameters(model)
    assert all((a != b).any() for a, b in zip(after, before, strict=True))


def test_a_copy_swaps_in_the_copy() -> None:
    model = a_model("bert-eager")
    NormaliserSwap(to="sink", learn=True).apply(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in learnt_parameters(other):
            parameter.fill_(100.0)
    assert (answers(other) - answers(model)).abs().max() > 1e-3


def test_only_some() -> None:
    model = a_model("gpt2-eager")
    undo = NormaliserSwap(to="sigmoid", only=("transformer.h.1.attn",)).apply(model)
    assert sum(isinstance(m, NormaliserModule) for m in model.modules()) == 1
    undo()
    with pytest.raises(InputError, match="no attention called nowhere; there are "):
        NormaliserSwap(to="sigmoid", only=("nowhere",)).apply(model)


def test_nothing_outside_the_module_is_touched() -> None:
    """A softmax of the user's own, and one that raises, leave no mode behind."""
    model = a_model("gpt2-eager")
    NormaliserSwap(to="sparsemax").apply(model)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model.transformer.h[0].attn(torch.zeros(1, 3, 5))
    row = torch.tensor([[[1.0, 0.0, -1.0]]])
    assert (row.softmax(-1) > 0).all()


@pytest.mark.parametrize("low", [-1e4, -65504.0, -1e9, -torch.inf])
@pytest.mark.parametrize("to", ["ssmax", "sigmoid", "softpick", "self-adjusted-safe"])
def test_every_number_that_hides_a_key_hides_it(to: str, low: float) -> None:
    z = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(2))
    mask = torch.zeros(5).masked_fill(torch.arange(5) > 2, low)
    with SoftmaxReplacement(NormaliserModule(to)):
        found = torch.softmax(z + mask, -1)
    assert (found[..., 3:] == 0).all()
    torch.testing.assert_close(found[..., :3], NormaliserModule(to)(z[..., :3]))


class Quiet(nn.Module):
    """Has projections like attention, and never weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)
        self.v_proj, self.o_proj = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o_proj(self.v_proj(x))
        return y


def test_attention_without_a_softmax_is_an_error() -> None:
    model = nn.Sequential(Quiet())
    undo = NormaliserSwap(to="sparsemax").apply(model)
    with pytest.raises(InputError, match="0 made no softmax over scores"):
        model(torch.zeros(1, 2, 4))
    undo()
    with pytest.raises(InputError, match="does not say how many heads"):
        NormaliserSwap(to="sink", learn=True).apply(model)


def test_unsupported_models_raise() -> None:
    with pytest.raises(InputError, match="no normaliser 'maxsoft'; there are "):
        NormaliserSwap(to="maxsoft")
    with pytest.raises(InputError, match="sigmoid has nothing to learn; ssmax"):
        NormaliserSwap(to="sigmoid", learn=True)
    with pytest.raises(InputError, match="Linear has no attention we know"):
        NormaliserSwap(to="sigmoid").apply(nn.Linear(2, 2))
    with pytest.raises(InputError, match="learns for 3 heads, but the scores are"):
        NormaliserModule("sink", heads=3)(torch.zeros(1, 2, 4, 4))
    fused = a_model("llama-eager")
    fused.config._attn_implementation = "flex_attention"
    with pytest.raises(InputError, match="runs flex_attention attention"):
        NormaliserSwap(to="sigmoid").apply(fused)
    with pytest.raises(InputError, match="apply normaliser first, then compile"):
        NormaliserSwap(to="sigmoid").apply(torch.compile(a_model("lab")))


def test_is_a_remedy() -> None:
    assert isinstance(NormaliserSwap(to="sigmoid"), Remedy)
