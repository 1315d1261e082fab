"""Facts of the learning rate: what moves it, how often, and what it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.watching.facts.loop_record import LoopRecord, ScheduleRecord, held


@dataclass(slots=True)
class ScheduleFacts:
    """Rates at the last updates, and how the schedules move between them."""

    record: LoopRecord
    name: str = "schedule"

    def facts(self) -> Mapping[str, Any]:
        record = self.record
        return {
            "rates": [
                {
                    "optimizer": type(optimizer).__name__,
                    "updates": kept.updates,
                    "rates": [list(rates or ()) for rates in kept.rates],
                    "at_zero": kept.at_zero,
                    "was_above_zero": kept.was_above_zero,
                    "passes": list(kept.passes_each),
                    "restarts": list(kept.restarts),
                    "scheduled": bool(kept.schedule)
                    or any("initial_lr" in g for g in optimizer.param_groups),
                }
                for optimizer, kept in record.of_the_model()
            ],
            "moves": [
                found
                for schedule, moves in record.schedules.items()
                if (found := self._moved(schedule, moves))
            ],
        }

    def _moved(self, schedule: Any, moves: ScheduleRecord) -> dict[str, Any]:
        """Return the moves of a schedule; nothing of one of another model."""
        theirs = moves.optimizer()
        if theirs is None:
            return {}
        known = dict(self.record.of_the_model())
        copies = _stepping_instead(theirs, known)
        if theirs not in known:
            return {}
        return {
            "class": moves.kind,
            "optimizer": type(theirs).__name__,
            "total": moves.total,
            "each": list(moves.moves_each),
            "at": getattr(schedule, "last_epoch", None),
            "passes": list(self.record.optimizers[theirs].passes_each),
            "updates": self.record.optimizers[theirs].updates,
            "instead": min(
                (known[o].updates - moves.begun.get(id(o), 0) for o in copies),
                default=0,
            ),
            "instead_rates": len(
                {rates for o in copies for rates in known[o].rates if rates}
            ),
        }


def _stepping_instead(optimizer: Any, known: Mapping[Any, Any]) -> list[Any]:
    """Return the optimisers that step the parameters of one, with rates of their own.

    A wrapper shares its groups with the optimiser inside it, and so the rates.
    """
    groups = set(map(id, optimizer.param_groups))
    return [
        other
        for other, kept in known.items()
        if other is not optimizer
        and kept.updates
        and not held(other).isdisjoint(held(optimizer))
        and groups.isdisjoint(map(id, other.param_groups))
    ]
