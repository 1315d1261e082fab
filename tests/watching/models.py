"""Small models to watch, and a training that remembers everything it did."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import equipoise
from equipoise.anatomy.families import FAMILIES, Separate, family
from equipoise.probes.window import SLOT
from equipoise.watching import Watch

WIDTH, HEADS, TOKENS, LENGTH = 16, 2, 11, 6


class TinyAttention(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.p = HEADS, dropout
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (
            f(x).view(B, T, -1, WIDTH // HEADS).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class TinyBlock(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = TinyAttention(dropout=dropout)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))
        return out


class TinyModel(nn.Module):
    """A decoder with BatchNorm statistics, so that a second forward would show."""

    def __init__(
        self, *, dropout: float = 0.0, reentrant: bool | None = None, depth: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(TinyBlock(dropout=dropout) for _ in range(depth))
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        x = self.statistics(x.flatten(0, 1)).view_as(x)
        out: Tensor = self.head(x)
        return out


@contextmanager
def declared(*names: str) -> Iterator[None]:
    """Declare the tiny model's attention as a family for the length of the block."""
    layout = Separate(q="q_proj", k="k_proj", v="v_proj", o="o_proj")
    names = names or ("TinyAttention",)
    family(*names)(lambda: layout)
    try:
        yield
    finally:
        for name in names:
            FAMILIES.pop(name)


def batches(count: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, TOKENS, (3, LENGTH + 1), generator=rng) for _ in range(count)
    ]


def objective(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@dataclass
class Trained:
    """Everything a training leaves behind that somebody could compare."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    """A GradScaler's factor after each step; it falls when a step was left out."""
    gradients: list[Tensor] = field(default_factory=list)
    evaluations: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimiser: list[Tensor] = field(default_factory=list)
    rng: Tensor = field(default_factory=lambda: torch.empty(0))


def identical(a: Trained, b: Trained) -> bool:
    """Say whether two trainings agree in every bit."""
    assert repr(a.losses) == repr(b.losses) and a.scales == b.scales
    for x, y in zip(
        [*a.gradients, *a.evaluations, *a.optimiser, a.rng],
        [*b.gradients, *b.evaluations, *b.optimiser, b.rng],
        strict=True,
    ):
        assert torch.equal(bits(x), bits(y))
    assert a.weights.keys() == b.weights.keys()
    assert all(torch.equal(bits(a.weights[k]), bits(b.weights[k])) for k in a.weights)
    return True


def bits(x: Tensor) -> Tensor:
    """Return a tensor as bytes: a NaN, too, must be the same NaN."""
    return x.detach().contiguous().flatten().view(torch.uint8)


def trained(
    make: Callable[[], nn.Module],
    *,
    run: Path | None = None,
    steps: int = 20,
    micro: int = 1,
    autocast: bool = False,
    clip: bool = True,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 0.0,
    **options: Any,
) -> tuple[Trained, Watch | None]:
    """Return what a training did; watched if a run file is given.

    ``scale`` is what a GradScaler begins with: a large one makes it leave steps out.
    """
    torch.manual_seed(0)
    model = wrap(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = None
    if run is not None:
        options = {"every": 3, "strict": True, **options}
        handle = equipoise.watch(model, optimizer, run=run, **options)
    memory = Trained()
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=scale or 1.0, growth_interval=4, enabled=bool(scale)
    )
    for step, batch in enumerate(batches(steps)):
        for _ in range(micro):
            context = torch.autocast("cpu", dtype) if autocast else nullcontext()
            with context:
                loss = objective(model, batch) / micro
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        memory.gradients += [
            p.grad.clone() for p in model.parameters() if p.grad is not None
        ]
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        memory.scales.append(scaler.get_scale())
        memory.losses.append(loss.item())
        if step % 4 == 1:
            memory.evaluations.append(evaluated(model, batch))
    if handle is not None:
        handle.close()
    memory.weights = {k: v.clone() for k, v in model.state_dict().items()}
    memory.optimiser = [
        v.clone()
        for state in optimizer.state.values()
        for v in state.values()
        if isinstance(v, Tensor)
    ]
    memory.rng = torch.get_rng_state()
    return memory, handle


class Digest:
    """Every bit of a training, too many to keep: a fingerprint of each kind."""

    def __init__(self) -> None:
        kinds = ("losses", "gradients", "evaluations", "weights", "optimiser", "rng")
        self._parts = {kind: hashlib.sha256() for kind in kinds}

    def step(self, loss: Tensor, model: nn.Module) -> None:
        self.loss(loss)
        self.gradients(model)

    def loss(self, loss: Tensor) -> None:
        self._add("losses", loss)

    def gradients(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                self._add("gradients", parameter.grad)

    def evaluation(self, model: nn.Module, batch: Tensor) -> None:
        self._add("evaluations", evaluated(model, batch))

    def end(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for value in model.state_dict().values():
            self._add("weights", value)
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._add("optimiser", value)
        self._add("rng", torch.get_rng_state())

    def parts(self) -> dict[str, str]:
        return {kind: part.hexdigest() for kind, part in self._parts.items()}

    def _add(self, kind: str, x: Any) -> None:
        x = x.to_local() if hasattr(x, "to_local") else x
        # A clone: FSDP2 keeps count of who looks at a weight's storage.
        self._parts[kind].update(bits(x.detach().clone()).numpy().tobytes())


@torch.no_grad()
def evaluated(model: nn.Module, batch: Tensor) -> Tensor:
    model.eval()
    out: Tensor = model(batch[:, :-1])
    model.train()
    return out


def hooks_on(model: nn.Module) -> int:
    """Return how many hooks and wrapped calls a model has, torch's global ones too."""
    kinds = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    on_modules = sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)
    on_parameters = sum(
        len(getattr(p, kind) or ())
        for p in model.parameters()
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )
    everywhere = torch.nn.modules.module
    on_all = len(everywhere._global_forward_hooks)
    on_all += len(everywhere._global_forward_pre_hooks)
    wrapped = sum(SLOT in m.__dict__ for m in model.modules())
    return on_modules + on_parameters + on_all + wrapped


class Late:
    """An event that is asked some times before it has happened; then numbers are."""

    def __init__(self, packed: Tensor, questions: int) -> None:
        self._packed, self._left = packed.clone(), questions
        self.buffer, self.waited = torch.full_like(packed, torch.nan), 0

    def query(self) -> bool:
        self._left -= 1
        return self._left < 0 and self._arrive()

    def synchronize(self) -> None:
        self.waited += not self.buffer.equal(self._packed)
        self._arrive()

    def _arrive(self) -> bool:
        self.buffer.copy_(self._packed)
        return True
