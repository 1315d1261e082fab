"""Weights that are a product of two softmaxes: linear attention, whose rows never are.

Efficient attention mixes values with a softmax over the tokens, and what that made with
a softmax over features: softmax(q) (softmax(k)ᵀ v). Neither is a row of attention. Each
alone looks like one, so a mix waits while its caller has another softmax in hand.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from equipoise.anatomy.callers import Caller
from equipoise.anatomy.traces import Mix

FACTORED = "its weights are a product of two softmaxes: linear attention has no rows"


@dataclass(slots=True)
class Factors:
    """Mixes that wait to hear whether they were half of a product."""

    report: Callable[[Mix], None]
    miss: Callable[[Caller, str], None]
    _waiting: dict[str, Mix] = field(default_factory=dict)

    def weigh(self, mix: Mix, operands: Iterable[Tensor], *, alone: bool) -> None:
        """Report a mix, now or once its caller has mixed again, or name the product."""
        before = self._waiting.pop(mix.caller.name, None)
        if before is not None:
            if any(_same(before.out, operand) for operand in operands):
                self.miss(mix.caller, FACTORED)
                return
            self.report(before)
        if alone:
            self.report(mix)
        else:
            self._waiting[mix.caller.name] = mix

    def settle(self) -> None:
        """Report what still waits: nothing was made of it."""
        while self._waiting:
            self.report(self._waiting.pop(next(iter(self._waiting))))


def _same(out: Tensor, operand: Tensor) -> bool:
    """Return whether an operand is what was made, or another view of it."""
    base = out if out._base is None else out._base
    return operand is base or operand._base is base or operand is out
