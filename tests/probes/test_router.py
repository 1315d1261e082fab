"""Routers are read as the model used them, against counts taken from its own calls."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.anatomy.discovery import anatomy_of
from equipoise.probes.capture import Boundary, attached
from equipoise.probes.router import (
    NO_CHOICE,
    Choice,
    RouterLoad,
    count_mask,
    entropy_of,
)
from tests.probes.reading import Emitter

E, K, WIDTH = 8, 2, 16


class Expert(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Stacked(nn.Module):
    """All experts in one module that is told which to use, as transformers 5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.maps = nn.Parameter(torch.randn(E, WIDTH, WIDTH))

    def forward(self, x_NC: Tensor, index_Nk: Tensor, w_Nk: Tensor) -> Tensor:
        y_NkC = torch.einsum("nc,nkdc->nkd", x_NC, self.maps[index_Nk])
        return (y_NkC * w_Nk[..., None]).sum(1)


class Biased(nn.Module):
    """DeepSeek V3's way: sigmoid scores, chosen by score + bias, weighted by score."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.top_k = K
        self.gate = nn.Linear(WIDTH, E, bias=False)
        self.register_buffer("balance_bias", torch.zeros(E))
        self.experts = nn.ModuleList(Expert() for _ in range(E)) if apart else Stacked()

    def forward(self, x: Tensor) -> Tensor:
        x_NC = x.flatten(0, -2)
        score_NE = self.gate(x_NC).sigmoid()
        index_Nk = (score_NE + self.balance_bias).topk(K, -1).indices
        w_Nk = score_NE.gather(-1, index_Nk)
        w_Nk = w_Nk / w_Nk.sum(-1, keepdim=True)
        self.chosen = index_Nk
        if isinstance(self.experts, Stacked):
            return self.experts(x_NC, index_Nk, w_Nk).view_as(x)
        y_NC = torch.zeros_like(x_NC)
        for number, expert in enumerate(self.experts):
            token, place = (index_Nk == number).nonzero(as_tuple=True)
            if len(token):
                y = expert(x_NC[token]) * w_Nk[token, place, None]
                y_NC = y_NC.index_add(0, token, y)
        return y_NC.view_as(x)


def read(model: nn.Module, *args: Any, **kwargs: Any) -> Emitter:
    emit = Emitter()
    with attached(
        [RouterLoad()], anatomy_of(model), emit, boundary=Boundary(strict=True)
    ):
        model(*args, **kwargs)
    return emit


def shares(index: Tensor, experts: int = E) -> Tensor:
    return torch.bincount(index.flatten(), minlength=experts) / index.numel()


@pytest.mark.parametrize("apart", [True, False])
def test_a_bias_that_sends_every_token_to_two_experts_is_seen(apart: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Biased(apart=apart))
    mixture = model[1]
    mixture.balance_bias[:2] = 10.0
    found = read(model, torch.randn(3, 5, WIDTH)).found
    load = found["1.gate", "router.load"]
    assert load.tolist() == [0.5, 0.5, 0, 0, 0, 0, 0, 0]
    assert found["1.gate", "router.max_violation"].item() == E / 2 - 1
    assert found["1.gate", "router.tokens"].item() == 3 * 5 * K
    assert found["1.gate", "router.dropped"].item() == 0
    torch.testing.assert_close(found["1.gate", "router.bias"], mixture.balance_bias)


@pytest.mark.parametrize("apart", [True, False])
def test_the_load_is_the_count_of_the_forward_pass(apart: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Biased(apart=apart))
    model[1].balance_bias.normal_(0, 0.3)
    found = read(model, torch.randn(3, 5, WIDTH)).found
    torch.testing.assert_close(found["1.gate", "router.load"], shares(model[1].chosen))


class Capacity(Biased):
    """Switch's way: each expert takes a few tokens, the rest get none."""

    def forward(self, x: Tensor) -> Tensor:
        x_NC = x.flatten(0, -2)
        first_N = self.gate(x_NC).argmax(-1)
        y_NC = torch.zeros_like(x_NC)
        for number, expert in enumerate(self.experts):
            token = (first_N == number).nonzero()[:1, 0]
            y_NC = y_NC.index_add(0, token, expert(x_NC[token]))
        self.taken = int(first_N.unique().numel())
        return y_NC.view_as(x)


def test_tokens_that_a_capacity_drops_are_counted() -> None:
    model = nn.Sequential(nn.Identity(), Capacity(apart=True))
    model[1].top_k = 1
    found = read(model, torch.randn(4, 6, WIDTH)).found
    dropped = found["1.gate", "router.dropped"].item()
    assert dropped == pytest.approx(1 - model[1].taken / 24)


class Dense(Biased):
    """Runs every expert on every token, and weighs all but two with 0 outside."""

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        kept = p >= p.topk(K, -1).values[..., -1:]
        every = torch.stack([expert(x) for expert in self.experts], -1)
        return (every * (p * kept)[..., None, :]).sum(-1)


def test_a_choice_that_no_call_shows_is_named_and_not_guessed() -> None:
    model = nn.Sequential(nn.Identity(), Dense(apart=True))
    emit = read(model, torch.randn(3, 5, WIDTH))
    assert ("1.gate", "router.load") not in emit.found
    assert ("1.gate", "router.entropy") in emit.found
    assert emit.reasons["1.gate"] == [NO_CHOICE]


def test_a_shared_router_adds_up_its_passes() -> None:
    mixture = Biased(apart=True)
    model = nn.Sequential(mixture, mixture)
    found = read(model, torch.randn(2, 5, WIDTH)).found
    # The emitter keeps the last call; nothing of the first may be in it.
    torch.testing.assert_close(found["0.gate", "router.load"], shares(mixture.chosen))


NORMALISED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z.exp(),
    "sigmoid": lambda z: 1 / (1 + (-z).exp()),
    "sqrtsoftplus": lambda z: z.exp().log1p().sqrt(),
}


@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("picks", [1, 2, 4])
@pytest.mark.parametrize("name", NORMALISED)
def test_the_entropy_is_that_of_the_routers_own_normalisation(
    name: str, picks: int, dtype: torch.dtype, renormalised: bool
) -> None:
    if picks == 1 and renormalised:
        name = "softmax"  # all weights are 1: nothing tells, and softmax is assumed
    z = torch.randn(200, E) * 2
    shares = NORMALISED[name](z.double())
    if name == "softmax":
        shares = shares / shares.sum(-1, keepdim=True)
    w, index = shares.topk(picks, -1)
    w = w / w.sum(-1, keepdim=True) if renormalised else w
    p = shares / shares.sum(-1, keepdim=True)
    truth = -(p * p.log()).sum(-1).mean().item()
    found = entropy_of(z, Choice(index, weights=(2.5 * w).to(dtype))).item()
    assert found == pytest.approx(truth, rel=1e-5)


def test_probabilities_are_not_normalised_again() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert entropy_of(p, Choice()).item() == pytest.approx(math.log(2))


def test_known_entropies() -> None:
    assert entropy_of(torch.zeros(5, 6), Choice()).item() == pytest.approx(math.log(6))
    assert entropy_of(100 * torch.eye(4), Choice()).item() == pytest.approx(0, abs=1e-6)
    broken = torch.tensor([[0.0, math.nan], [0.0, 1.0]])
    assert math.isnan(entropy_of(broken, Choice()).item())


def test_a_mask_that_is_not_sparse_reads_nan() -> None:
    assert count_mask(torch.ones(3, 4), 2).isnan().all()
    assert count_mask(F.one_hot(torch.tensor([1, 1, 2]), 4), 1).tolist() == [0, 2, 1, 0]


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
}
DEEPSEEK = {
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
LOCAL = {"num_local_experts": E, "num_experts_per_tok": K}
FOREIGN = [
    ("MixtralForCausalLM", LOCAL),
    ("Qwen3MoeForCausalLM", {"num_experts": E, "num_experts_per_tok": K}),
    ("GptOssForCausalLM", LOCAL),
    ("DeepseekV3ForCausalLM", DEEPSEEK),
    ("OlmoeForCausalLM", {"num_experts": E, "num_experts_per_tok": K}),
    ("Llama4ForCausalLM", {"num_local_experts": E, "interleave_moe_layer_step": 1}),
    ("JetMoeForCausalLM", {"num_local_experts": E, "num_experts_per_tok": K}),
]


@pytest.mark.parametrize(("name", "sizes"), FOREIGN, ids=[n for n, _ in FOREIGN])
def test_routers_of_transformers(name: str, sizes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**{**SMALL, **sizes})
    config._experts_implementation = "eager"
    model = kind(config).eval()
    routers = anatomy_of(model).routers
    assert len(routers) >= 2
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if "correction_bias" in key:
                buffer[:2] = 10.0
    truth = {site: counted(router.module) for site, router in routers.items()}
    ids = torch.randint(3, 60, (2, 9))
    emit = read(model, ids)
    for site, counts in truth.items():
        (count,) = counts
        torch.testing.assert_close(
            emit.found[site, "router.load"], (count / count.sum()).float()
        )
        assert site not in emit.reasons


def counted(router: nn.Module) -> list[Tensor]:
    """Return the list that will hold the counts of the router's own output."""
    counts: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        kinds = [item for item in output if isinstance(item, list)]
        whole = [t for t in output if isinstance(t, Tensor) and t.dtype == torch.int64]
        if kinds:
            counts.append(torch.tensor(kinds[0]))
        elif whole:
            counts.append(torch.bincount(whole[-1].flatten(), minlength=E))
        else:  # Llama 4: sigmoid of -inf is 0 where not chosen
            counts.append((output[0] > 0).sum(0))

    router.register_forward_hook(note)
    return counts
