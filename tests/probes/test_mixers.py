"""Mixers without softmax: gates against what the model handed to its own recurrence."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.recurrent import mixer
from equipoise.probes.capture import Boundary, attached
from equipoise.probes.mixers import NOT_CALLED, MixerGates
from tests.probes.reading import Emitter

SHARED: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PURE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
DELTA: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": SHARED | LINEAR | EXPERTS | {"head_dim": 8},
    "Qwen3_5ForCausalLM": SHARED | LINEAR | {"head_dim": 8},
    "OlmoHybridForCausalLM": SHARED | LINEAR,
    "KimiLinearForCausalLM": SHARED
    | {
        "num_key_value_heads": 4,
        "layer_types": LINEAR["layer_types"],
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "linear_attn_num_heads": 4,
        "linear_attn_head_dim": 8,
    },
}
STEP: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": SHARED | MAMBA2 | {"attn_layer_indices": [1]},
    "Mamba2ForCausalLM": PURE | {"head_dim": 16, "num_heads": 4, "n_groups": 1},
    "GraniteMoeHybridForCausalLM": SHARED
    | MAMBA2
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 4},
    "NemotronHForCausalLM": SHARED
    | {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "head_dim": 8,
        "layers_block_type": ["mamba", "attention"],
    },
    "FalconH1ForCausalLM": SHARED
    | MAMBA2
    | {"mamba_d_ssm": 64, "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 0.5]},
    "Zamba2ForCausalLM": SHARED
    | {
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1,
    },
}
CHANNELS: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": PURE,
    "FalconMambaForCausalLM": PURE,
    "JambaForCausalLM": SHARED
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
}
RECURRENCES = (
    *("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"),
    *("mamba2_chunk_scan", "mamba_selective_scan"),
)


def build(name: str, options: dict[str, Any]) -> nn.Module:
    """Return a small model whose decays are spread over all that they can be."""
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**options)).train()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            own = part.rpartition(".")[2]
            if own in ("A_log", "dt_bias") or part.endswith("dt_proj.bias"):
                parameter.normal_(0, 2.5)
    return model


def read(model: nn.Module, ids: Tensor) -> Emitter:
    emit = Emitter()
    probes, anatomy = [MixerGates()], anatomy_of(model)
    with attached(probes, anatomy, emit, boundary=Boundary(strict=True)):
        model(ids)
    return emit


def heard(model: nn.Module, patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Write down what the model's recurrences are called with, in their order."""
    calls: list[dict[str, Any]] = []
    home = sys.modules[type(model).__module__]
    for name in RECURRENCES:
        if (own := getattr(home, name, None)) is not None:

            def listening(*args: Any, own: Any = own, **kwargs: Any) -> Any:
                calls.append({"args": args, **kwargs})
                return own(*args, **kwargs)

            patch.setattr(home, name, listening)
    return calls


def shares(ln_decay_BTHX: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Return the shares per head below 2⁻⁸, and of half-lives beyond the sequence."""
    decay = np.exp(np.float64(ln_decay_BTHX))
    length = decay.shape[1]
    with np.errstate(divide="ignore"):
        half_life = np.log(2) / -np.log(decay)
    return (decay < 1 / 256).mean((0, 1, 3)), (half_life > length).mean((0, 1, 3))


def array(x: Tensor) -> np.ndarray[Any, Any]:
    return x.detach().double().numpy()


IDS = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", DELTA)
def test_delta_rules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name, DELTA[name])
    calls = heard(model, monkeypatch)
    emit = read(model, IDS)
    ((site, _),) = (key for key in emit.found if key[1] == "mixer.forgets")
    (call,) = calls
    beta = array(call["beta"])
    g = array(call["g"]).reshape(*beta.shape, -1)
    _same_ends(emit, site, g)
    _close(emit.found[site, "mixer.write"], beta.mean((0, 1)))
    assert not emit.reasons


@pytest.mark.parametrize("name", STEP)
def test_steps_per_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name, STEP[name])
    calls = heard(model, monkeypatch)
    emit = read(model, IDS)
    sites = [site for site, quantity in emit.found if quantity == "mixer.forgets"]
    assert len(sites) == len(calls) > 0
    for site, call in zip(sites, calls, strict=True):
        _, dt, rate = call["args"][:3]
        step = np.logaddexp(0, array(dt) + array(call["dt_bias"]))
        step = np.clip(step, *call.get("dt_limit", (0, np.inf)))
        _same_ends(emit, site, (array(rate) * step)[..., None])
        _close(emit.found[site, "mixer.step"], step.mean((0, 1)))
    assert not emit.reasons


@pytest.mark.parametrize("name", CHANNELS)
def test_steps_per_channel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name, CHANNELS[name])
    calls = heard(model, monkeypatch)
    emit = read(model, IDS)
    sites = [site for site, quantity in emit.found if quantity == "mixer.forgets"]
    assert len(sites) == len(calls) > 0
    for site, call in zip(sites, calls, strict=True):
        _, raw_BDT, rate_DN = call["args"][:3]
        bias_D = array(call["delta_bias"])
        step_BTD = np.logaddexp(0, array(raw_BDT).swapaxes(1, 2) + bias_D)
        ln = (array(rate_DN) * step_BTD[..., None]).reshape(2, 12, 1, -1)
        _same_ends(emit, site, ln)
        _close(emit.found[site, "mixer.step"], step_BTD.mean()[None])
    assert not emit.reasons


def _same_ends(emit: Emitter, site: str, ln_decay: np.ndarray[Any, Any]) -> None:
    forgets, lasts = shares(ln_decay)
    _close(emit.found[site, "mixer.forgets"], forgets)
    _close(emit.found[site, "mixer.lasts"], lasts)
    assert 0 < forgets.sum() + lasts.sum() < 2 * len(forgets)  # not all one end


def _close(found: Tensor, expected: np.ndarray[Any, Any]) -> None:
    torch.testing.assert_close(
        found.double(), torch.as_tensor(expected), rtol=2e-5, atol=2e-6
    )


def test_fixed_decays() -> None:
    options = SHARED | {"head_dim": 8, "layer_types": LINEAR["layer_types"]}
    options |= {"num_local_experts": 4, "block_size": 8}
    config = transformers.MiniMaxConfig(**options)
    model = transformers.MiniMaxForCausalLM(config)
    emit = read(model, IDS)
    slope = array(model.model.layers[0].self_attn.slope_rate).ravel()
    lasts = (slope * 12 < np.log(2)).astype(float)
    assert 0 < lasts.sum() < 4
    _close(emit.found["model.layers.0.self_attn", "mixer.lasts"], lasts)
    recurrent = transformers.RwkvConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=64
    )
    emit = read(transformers.RwkvForCausalLM(recurrent), IDS)
    assert {q for _, q in emit.found} == {"mixer.forgets", "mixer.lasts"}


def test_gates_that_are_not_known_are_not_guessed() -> None:
    options = SHARED | {"head_dim": 8, "block_types": ["recurrent", "attention"]}
    config = transformers.RecurrentGemmaConfig(**options, lru_width=32)
    model = transformers.RecurrentGemmaForCausalLM(config)
    kinds = {name: found.kind for name, found in anatomy_of(model).mixers.items()}
    assert kinds == {"model.layers.0.temporal_block": "unknown"}
    emit = read(model, IDS)
    assert not emit.found and not emit.reasons


def test_short_convolutions_have_no_gates_to_read() -> None:
    options = SHARED | {"layer_types": ["conv", "full_attention"]}
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**options))
    kinds = {name: found.kind for name, found in anatomy_of(model).mixers.items()}
    assert kinds == {"model.layers.0.conv": "convolution"}
    assert not read(model, IDS).found


class Fused(nn.Module):
    """Takes the weights of its parts and calls none, as fused kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.dt_bias = (nn.Parameter(torch.zeros(2)) for _ in range(2))
        self.in_proj = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.in_proj.weight.mT @ self.in_proj.weight


def test_parts_that_are_not_called_are_named() -> None:
    emit = read(Fused(), torch.ones(1, 3, 4))
    assert emit.reasons == {"": [NOT_CALLED]} and not emit.found


def test_nan_is_not_hidden() -> None:
    model = build("Mamba2ForCausalLM", STEP["Mamba2ForCausalLM"])
    with torch.no_grad():
        model.backbone.layers[0].mixer.A_log[1] = torch.nan
    found = read(model, IDS).found["backbone.layers.0.mixer", "mixer.forgets"]
    assert found.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("plain", [nn.Linear(4, 4), nn.Conv1d(4, 4, 3)])
def test_other_modules_are_no_mixers(plain: nn.Module) -> None:
    assert mixer(plain) is None
    assert mixer(nn.Sequential(plain)) is None
