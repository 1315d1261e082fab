"""What a case of the benchmark is, and how one is declared.

    @mistake("check.stale_gradient", source="stackoverflow 60335387")
    def gradients_not_cleared(wrong: bool, watch: Attach) -> None:
        model, optimizer = ...
        handle = watch(model, optimizer)
        for step in range(STEPS):
            loss(model).backward()
            optimizer.step()
            if not wrong:
                optimizer.zero_grad()

    @control("adversarial networks", source="pytorch/examples dcgan")
    def two_networks(watch: Attach) -> None: ...

A case is a whole program as a user would write it: it builds its model, attaches the
instrument in one line and trains for at least ``STEPS`` updates. It says nothing else
to the instrument. With ``wrong`` false it is a correct program that differs from the
mistaken one in nothing but the mistake.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

STEPS = 40
"""Updates that a case makes at least."""
Kind = Literal[
    "own loop",
    "transformers",
    "accelerate",
    "lightning",
    "peft",
    "trl",
    "ddp",
    "fsdp2",
    "compiled",
]
Half = Literal["opened", "sealed", "sealed_second"]
"""Each is a package of that name; the sealed ones are not read before they are run."""


class Attach(Protocol):
    """How a case attaches the instrument, by the door that its program would use."""

    def __call__(self, model: Any, optimizer: Any = None, **options: Any) -> Any:
        """As :func:`equipoise.watch`."""
        ...

    def trainer_callback(self, **options: Any) -> Any:
        """Return the callback for a ``Trainer`` of transformers or TRL."""
        ...

    def lightning_callback(self, **options: Any) -> Any:
        """Return the callback for Lightning's ``Trainer``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program: a mistake with its twin, or a correct program that looks odd."""

    name: str
    half: Half
    codes: tuple[str, ...]
    """Findings that name the mistake, the best one first; empty for a control."""
    source: str
    """A public thread, paper or program in which it was met."""
    kind: Kind = "own loop"
    ranks: int = 1
    """Processes that run it together, over gloo."""
    run: Callable[[bool, Attach], None]
    """Called with whether to make the mistake; a control is never asked to."""

    @property
    def is_control(self) -> bool:
        return not self.codes


CASES: dict[str, Case] = {}
"""Name → case, in the order they are declared."""


@cache
def relations_by_area() -> dict[str, dict[str, str]]:
    """Return area → code → the relation that must hold."""
    path = Path(__file__).with_name("relations.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


@cache
def relations() -> dict[str, str]:
    """Return code → the relation that must hold."""
    groups = relations_by_area().values()
    return {code: text for group in groups for code, text in group.items()}


def mistake(
    *codes: str, source: str, kind: Kind = "own loop", ranks: int = 1
) -> Callable[[Callable[[bool, Attach], None]], Callable[[bool, Attach], None]]:
    """Declare a mistake and the codes of the findings that would name it.

    Raises:
        ValueError: If no code is given, or one that ``relations.toml`` lacks.
    """
    unknown = [code for code in codes if code not in relations()]
    if unknown or not codes:
        raise ValueError(f"codes of relations.toml, at least one; not {unknown}")

    def declare(
        run: Callable[[bool, Attach], None],
    ) -> Callable[[bool, Attach], None]:
        _add(run, run, codes=codes, source=source, kind=kind, ranks=ranks)
        return run

    return declare


def control(
    *, source: str, kind: Kind = "own loop", ranks: int = 1
) -> Callable[[Callable[[Attach], None]], Callable[[Attach], None]]:
    """Declare a correct program, of which nothing may be said."""

    def declare(run: Callable[[Attach], None]) -> Callable[[Attach], None]:
        def correct(wrong: bool, watch: Attach) -> None:
            assert not wrong, "a control makes no mistake"
            run(watch)

        _add(run, correct, codes=(), source=source, kind=kind, ranks=ranks)
        return run

    return declare


def _add(
    named: Callable[..., None], run: Callable[[bool, Attach], None], **fields: Any
) -> None:
    name = named.__name__
    if name in CASES:
        raise ValueError(f"two cases are called {name}")
    package = named.__module__.split(".")[-2]
    halves: dict[str, Half] = {one: one for one in get_args(Half)}
    half = halves.get(package, "opened")
    CASES[name] = Case(name=name, half=half, run=run, **fields)
