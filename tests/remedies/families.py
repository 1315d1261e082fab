"""Small models of four families, an optimiser for each, and what a test compares."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.models import GPT, GPTConfig

VOCABULARY = 64
X = torch.arange(10)[None] + torch.tensor([[3], [7]])
Y = (X * 5 + 1) % VOCABULARY
FAMILIES = ("lab", "gpt2", "llama", "torch")


class TorchModel(nn.Module):
    """torch's own encoder between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.embedding(x)))
        return found


def a_model(family: str, **lab: Any) -> nn.Module:
    """Return a model with its own seed's weights, attention far from uniform."""
    torch.manual_seed(0)
    model: nn.Module
    match family:
        case "gpt2":
            sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY}
            none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            model = GPT2LMHeadModel(GPT2Config(**sizes, **none))
        case "llama":
            model = LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=16,
                    intermediate_size=32,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    vocab_size=VOCABULARY,
                )
            )
        case "torch":
            model = TorchModel()
        case _:
            sizes = {"width": 16, "depth": 2, "heads": 2, "vocabulary": VOCABULARY}
            model = GPT(GPTConfig(**{**sizes, **lab}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def an_optimizer(model: nn.Module, lr: float = 1e-2) -> Optimizer:
    """Return AdamW with one group that decays and one that does not."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr)


def logits(model: nn.Module) -> Tensor:
    out = model(X)
    return out if isinstance(out, Tensor) else out.logits


def loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(logits(model).flatten(0, 1), Y.flatten())


def train(model: nn.Module, optimizer: Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return everything that an undo must restore, as plain values and copies."""
    return {
        "tensors": {n: x.clone() for n, x in model.state_dict().items()},
        "order": [n for n, _ in model.named_parameters()],
        "attributes": {
            n: {k: v for k, v in vars(m).items() if isinstance(v, float | int)}
            for n, m in model.named_modules()
        },
        "hooks": {
            n: [len(vars(m)[t]) for t in vars(m) if t.endswith("hooks")]
            for n, m in model.named_modules()
        },
        "groups": [
            {k: v for k, v in g.items() if k != "params"}
            for g in optimizer.param_groups
        ],
        "parameters": [[id(p) for p in g["params"]] for g in optimizer.param_groups],
        "moments": {
            (id(p), k): v.clone()
            for p, s in optimizer.state.items()
            for k, v in s.items()
        },
        "step hooks": [
            len(optimizer._optimizer_step_pre_hooks),
            len(optimizer._optimizer_step_post_hooks),
        ],
        "rng": torch.get_rng_state(),
    }


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Return where two states differ, bit for bit."""
    if isinstance(a, Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [where]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{where}: {a.keys() ^ b.keys()}"]
        return [d for k in a for d in differences(a[k], b[k], f"{where}/{k}")]
    return [] if a == b else [f"{where}: {a} is not {b}"]
