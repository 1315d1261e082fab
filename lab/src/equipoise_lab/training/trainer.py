"""The trainer: a small loop, exact to resume, the same alone and under torchrun.

Norms of gradients and updates are taken module by module here and not by watch, so
that an unwatched run can say which projection starves.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.remedies.temperature import temperature_settings
from equipoise.watching import Watch, watch
from equipoise.watching.options import Preset
from equipoise_lab.data import Batches
from equipoise_lab.data.batches import share
from equipoise_lab.models import MixtureOfExperts
from equipoise_lab.training import checkpoint
from equipoise_lab.training.distributed import averaged, device, unsynchronised, wrapped
from equipoise_lab.training.options import (
    Precision,
    TrainingProgress,
    TrainOptions,
    TrainResult,
)

Listener = Callable[[TrainingProgress], None]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains one model on one stream of batches.

    With a ``folder`` it keeps checkpoints there and continues from the newest. The
    caller seeds and builds the model; under ``torchrun`` it is wrapped here.
    ``before_step`` may change the trainer once the step's learning rate is set.

    >>> from equipoise_lab.data import Windows, embedded
    >>> from equipoise_lab.models import GPT, GPTConfig
    >>> data = Windows(embedded(), context=16, batch=2)
    >>> options = TrainOptions(steps=2, warmup=0, watch=False)
    >>> len(Trainer(GPT(GPTConfig(depth=1)), data, options).run().losses)
    2
    """

    def __init__(
        self,
        model: nn.Module,
        data: Batches,
        options: TrainOptions,
        *,
        folder: Path | None = None,
        info: dict[str, Any] | None = None,
        listener: Listener | None = None,
        before_step: Callable[["Trainer"], None] | None = None,
    ) -> None:
        self.data, self.options, self.folder = data, options, folder
        self.info, self.listener = info or {}, listener
        self.before_step = before_step
        self.device = device()
        self.model = wrapped(model.to(self.device), options.parallel)
        self.temperatures = temperature_settings(model) if options.tau_steps else []
        self.routers = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
        self.optimizer = adamw(self.model, options)
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=options.precision == "fp16"
        )
        self.parts = PartNorms(self.model, every=options.parts_every)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._read: list[tuple[float, float]] = []
        self._unread: list[Tensor] = []
        self._watched: Watch | None = None
        self._watch_state: dict[str, Any] | None = None
        torch.manual_seed(options.seed * 10_007 + share().rank)
        self._resume()

    def run(self) -> TrainResult:
        """Train to the last step and return the curves."""
        started = time.perf_counter() - self.seconds
        with self.watching() as watched:
            while self.step < self.options.steps and not self._has_diverged():
                self._before_step()
                loss, norm = self.one_step()
                if watched is not None:
                    watched.step(loss=loss)
                self._after_step(loss, norm)
                self.seconds = time.perf_counter() - started
        self._flush()
        losses, norms = zip(*self._read, strict=True) if self._read else ((), ())
        return TrainResult(
            losses=losses,
            gradient_norms=norms,
            clip=self.options.clip,
            seconds=self.seconds,
            tokens=self.tokens,
            parts=self.parts.state() if self.options.parts_every else {},
        )

    def _has_diverged(self) -> bool:
        """Return whether to give up; losses are read every ten steps, so then."""
        limit, read = self.options.give_up, self._read[-10:]
        if limit is None or self._unread or not read:
            return False
        return not sum(loss for loss, _ in read) / len(read) <= limit

    def one_step(self) -> tuple[Tensor, Tensor]:
        """Take one optimiser step; return the mean loss and the gradient norm."""
        parts = self.options.accumulation
        total = torch.zeros((), device=self.device)
        for part in range(parts):
            with unsynchronised(self.model, last=part == parts - 1):
                loss, extra = self.micro_batch()
                torch.autograd.backward(self.scaler.scale((loss + extra) / parts))
            total += loss.detach() / parts
        self.scaler.unscale_(self.optimizer)
        self.parts.gradients()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.parts.after()
        self.optimizer.zero_grad(set_to_none=True)
        return averaged(total), whole(norm)

    def micro_batch(self) -> tuple[Tensor, Tensor | float]:
        """Return the loss of the next batch, and what routers add to it."""
        x, y = (t.to(self.device, non_blocking=True) for t in self.data.take())
        with autocast(self.device, self.options.precision):
            logits = self.model(x)
        self.tokens += y.numel() * share().world
        loss = F.cross_entropy(logits.flatten(0, -2).float(), y.flatten())
        balance = [m.balance_loss for m in self.routers if m.balance_loss is not None]
        return loss, self.options.balance_weight * sum(balance, 0.0)

    @contextmanager
    def watching(self) -> Iterator[Watch | None]:
        if not self.options.watch:
            yield None
            return
        run = self.folder / "run.eqp" if self.folder else None
        with watch(
            self.model,
            self.optimizer,
            run=run,
            every=self.options.every,
            at=self.options.at,
            dense_start=False,  # a recipe says which steps it samples
            preset=cast(Preset, self.options.preset),  # checked by WatchOptions
            info=self.info,
        ) as watched:
            # Killed before its first checkpoint, a run file is ahead of the weights.
            start = {"step": self.step, "next_due": self.step}
            fresh = {**start, "interval": self.options.every}
            watched.load_state_dict(self._watch_state or fresh)
            self._watched = watched
            yield watched

    def _before_step(self) -> None:
        lr = self.options.schedule.at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for setting in self.temperatures:
            setting.set(self.options.temperature.at(self.step))
        if self.before_step is not None:
            self.before_step(self)
        self.parts.before(self.step)

    def _after_step(self, loss: Tensor, norm: Tensor) -> None:
        self.step += 1
        self._unread.append(torch.stack([loss, norm.to(loss)]))
        every = self.options.checkpoint_every
        due = bool(every and self.folder) and self.step % (every or 1) == 0
        # Reading a loss waits for the device, so not at every step.
        if due or self.step % 10 == 0 or self.step == self.options.steps:
            self._flush()
            self._report_progress()
        if due:
            self._save()

    def _flush(self) -> None:
        if self._unread:
            pairs = torch.stack(self._unread).tolist()
            self._read += [(loss, norm) for loss, norm in pairs]
            self._unread.clear()

    def _report_progress(self) -> None:
        if self.listener is None or not checkpoint.is_writer():
            return
        loss, norm = self._read[-1]
        self.listener(
            TrainingProgress(
                step=self.step,
                steps=self.options.steps,
                loss=loss,
                gradient_norm=norm,
                warning=self._warning(loss),
            )
        )

    def _warning(self, loss: float) -> str:
        """Return the newest finding that is more than information."""
        found = self._watched.findings if self._watched else ()
        grave = [f.message for f in found if f.severity != "info"]
        if not math.isfinite(loss):
            grave.append("the loss is not finite")
        return grave[-1] if grave else ""

    def _save(self) -> None:
        assert self.folder is not None
        state = {
            "curves": self._read,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "scaler": self.scaler.state_dict(),
            "parts": self.parts.state(),
        }
        watched = self._watched.state_dict() if self._watched else None
        checkpoint.save(
            self.folder / "checkpoints",
            self.model,
            self.optimizer,
            step=self.step,
            state=state,
            mine={"data": self.data.state(), "watch": watched},
        )

    def _resume(self) -> None:
        found = checkpoint.finished(self.folder / "checkpoints") if self.folder else []
        if not found:
            return
        state, mine = checkpoint.load(found[-1], self.model, self.optimizer)
        self.step, self.tokens = state["step"], state["tokens"]
        self.seconds = state["seconds"]
        self._read = [(loss, norm) for loss, norm in state["curves"]]
        self._watch_state = mine["watch"]
        self.scaler.load_state_dict(state["scaler"])
        self.parts.restore(state["parts"])
        self.data.restore(mine["data"])


def adamw(model: nn.Module, options: TrainOptions) -> torch.optim.AdamW:
    """Return AdamW that decays matrices and leaves norms and biases alone."""
    named = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named if p.dim() >= 2]},
        {"params": [p for p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=options.lr,
        betas=options.betas,
        weight_decay=options.weight_decay,
        fused=not _sharded(model),
    )


def _sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def whole(value: Tensor) -> Tensor:
    """Return an ordinary tensor; under FSDP2 a norm arrives in parts."""
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


# Part of a parameter's name → the role it plays; the first that fits.
ROLES = (
    ("q_proj", "q"),
    ("k_proj", "k"),
    ("v_proj", "v"),
    ("o_proj", "o"),
    ("norm", "norm"),
    ("feedforward", "feedforward"),
    ("embedding", "embedding"),
)
_BLOCK = re.compile(r"blocks\.(\d+)\.")


class PartNorms:
    """‖gradient‖ before clipping and ‖change‖ of each role in each block.

    >>> layer = nn.ModuleDict({"q_proj": nn.Linear(2, 2, bias=False)})
    >>> parts = PartNorms(layer, every=1)
    >>> layer["q_proj"].weight.grad = torch.ones(2, 2)
    >>> parts.before(0); parts.gradients(); parts.after()
    >>> parts.state()["gradient"], parts.state()["update"]
    ({'q': [2.0]}, {'q': [0.0]})
    """

    def __init__(self, model: nn.Module, *, every: int) -> None:
        self.every, self.steps = every, list[int]()
        self.named = [(site(n), p) for n, p in model.named_parameters()]
        self.found: dict[str, dict[str, list[float]]] = {"gradient": {}, "update": {}}
        self._before: list[Tensor] | None = None

    def before(self, step: int) -> None:
        """Remember the weights if this step is one to measure."""
        if not self.every or step % self.every:
            return
        self.steps.append(step)
        self._before = [p.detach().clone() for _, p in self.named]

    def gradients(self) -> None:
        """Read gradients: unscaled, not yet clipped."""
        if self._before is not None:
            held = [(s, p.grad) for s, p in self.named if p.grad is not None]
            self._keep("gradient", held)

    def after(self) -> None:
        """Read how far the optimiser moved each part."""
        if self._before is None:
            return
        old, self._before = self._before, None
        moved = [
            (where, p.detach() - was)
            for (where, p), was in zip(self.named, old, strict=True)
        ]
        self._keep("update", moved)

    def _keep(self, kind: str, tensors: list[tuple[str, Tensor]]) -> None:
        for where, norm in norms(tensors):
            self.found[kind].setdefault(where, []).append(norm)

    def state(self) -> dict[str, Any]:
        """Return what was read, for a checkpoint or a result."""
        return {"steps": self.steps, **self.found}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps = list(state["steps"])
        self.found = {kind: dict(state[kind]) for kind in self.found}


def site(name: str) -> str:
    """Return where a parameter is counted: ``3.q`` in block 3, a role outside.

    >>> site("blocks.3.attention.q_proj.weight"), site("final_norm.bias")
    ('3.q', 'norm')
    """
    role = next((role for part, role in ROLES if part in name), "other")
    block = _BLOCK.search(name)
    return f"{block[1]}.{role}" if block else role


def norms(tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, float]]:
    """Yield each site's norm over all of its tensors, shards put together."""

    grouped: dict[str, list[Tensor]] = {}
    for where, tensor in tensors:
        size = whole(torch.linalg.vector_norm(tensor.float()))
        grouped.setdefault(where, []).append(size)
    for where, sizes in grouped.items():
        yield where, torch.linalg.vector_norm(torch.stack(sizes)).item()
