"""Notices a non-finite loss or norm when it passes by, and says where it began."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise.anatomy.sharding import needs_all_ranks
from equipoise.anatomy.sites import unwrapped
from equipoise.records import Finding
from equipoise.watching import replay as forensics
from equipoise.watching.batch import Batch
from equipoise.watching.replay import Culprit, bundle_path, first_bad_module, save

ADVICE = {
    "forward": "look at the scale of what enters that site, or run it in float32",
    "backward": "clip gradients, lower the learning rate; under fp16 use a GradScaler",
    "update": "go back to the last checkpoint: the weights are broken already",
}


@dataclass(slots=True)
class Alarm:
    """Rings once when numbers go bad, and is ready again when they are good."""

    model: nn.Module
    rank: int = 0
    ringing: bool = False
    _quiet_step: bool = True
    held: Callable[[], Batch | None] = lambda: None
    """The step's batch, where it is held."""
    keep: Path | None = None
    """The run beside which a broken step is saved."""
    _found: list[Finding] = field(default_factory=list)

    @torch.no_grad()
    def loss(self, step: int, loss: Tensor, root: Tensor) -> None:
        """Look at a loss before its backward pass."""
        if not forensics.is_bad(loss):
            return
        if not self.ringing:
            culprit = (
                forensics.broken_weight(self.model)
                or self._replayed(step)
                or forensics.broken_activation(self.model, root)
            )
            self._ring(step, culprit)
        self._quiet_step = False

    @torch.no_grad()
    def norm(self, step: int, norm: Tensor, *, scaled: bool) -> None:
        """Look at a gradient norm before it clips."""
        if not forensics.is_bad(norm):
            return
        if not self.ringing:
            # A GradScaler finds its scale by overflowing now and then.
            if not scaled:
                self._replayed(step)
            self._ring(step, forensics.broken_gradient(self.model), expected=scaled)
        self._quiet_step = False

    @torch.no_grad()
    def late(self, step: int, quantity: str) -> None:
        """Take note of a value that was read only after its step: on an accelerator."""
        if not self.ringing:
            model = self.model
            culprit = forensics.broken_weight(model) or forensics.broken_gradient(model)
            self._ring(step, culprit, quantity=quantity)
        self._quiet_step = False

    def taken(self) -> list[Finding]:
        """End a step: return what was found; be ready again if it was a good one."""
        found, self._found = self._found, []
        self.ringing = self.ringing and not self._quiet_step
        self._quiet_step = True
        return found

    def heed(self, findings: list[Finding]) -> None:
        """Ring also for what another rank has found."""
        if any(finding.rule.startswith("nonfinite.") for finding in findings):
            self.ringing, self._quiet_step = True, False

    def _replayed(self, step: int) -> Culprit | None:
        """Save the held batch, run it once more, and see where it goes wrong."""
        batch = self.held()
        # Only this rank may be ill: a pass that gathers weights would wait for ever.
        if batch is None or needs_all_ranks(self.model):
            return None
        if self.keep is not None:
            save(bundle_path(self.keep, step), batch, unwrapped(self.model))
        return first_bad_module(self.model, batch)

    def _ring(
        self,
        step: int,
        culprit: Culprit | None,
        *,
        expected: bool = False,
        quantity: str = "loss",
    ) -> None:
        self.ringing = True
        self._found.append(_finding(step, culprit, self.rank, quantity, expected))


def _finding(
    step: int, culprit: Culprit | None, rank: int, quantity: str, expected: bool
) -> Finding:
    if culprit is None:
        return Finding(
            step=step,
            severity="error",
            rule="nonfinite.unknown",
            message=f"the {quantity} is not finite; no tensor that still exists is",
            advice="watch with hold_batch=True: the step is then replayed",
            evidence={"rank": rank},
        )
    return Finding(
        step=step,
        severity="info" if expected else "error",
        rule=f"nonfinite.{culprit.direction}",
        site=culprit.site,
        message=culprit.sentence[:-1] + f", rank {rank})",
        advice=ADVICE[culprit.direction],
        evidence={"kind": culprit.kind, "direction": culprit.direction, "rank": rank},
    )
