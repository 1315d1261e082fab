"""Finds where a non-finite loss or gradient norm began, without a hook in place.

A non-finite loss is seen before its backward pass. The autograd graph then still holds
what the forward pass saved: walking it in forward order finds the first bad tensor,
of this very batch, before any weight has moved. A non-finite gradient norm is seen
before it clips: the bad gradient nearest the loss came first. A weight that is already
bad when the loss is computed was broken by the update before.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise.anatomy.sharding import local_part, needs_all_ranks
from equipoise.anatomy.sites import named, unwrapped
from equipoise.records import Finding, Scalar
from equipoise.watching.step.batch import Batch, bundle_path, save_step
from equipoise.watching.step.readings import Entry

Direction = Literal["forward", "backward", "update"]
Kind = Literal["NaN", "Inf"]
Role = Literal["weight", "gradient", "input", "result", "output", "loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The first non-finite tensor, as far as can be seen."""

    direction: Direction
    site: str
    kind: Kind
    tensor: Role
    parameter: str = ""
    """Name of the weight, or of the weight whose gradient it is."""
    operation: str = ""
    """What the tensor is the input or the result of."""
    after: str = ""
    """The last module with parameters before an operation that has none."""


def host_value(scalar: Tensor) -> float | None:
    """Return a scalar that is on the host already; None if reading it would wait."""
    if scalar.device.type != "cpu":
        return None
    # Through NumPy: the model's operators are not called, in a profile or otherwise.
    return float(local_part(scalar.detach()).double().numpy().reshape(()))


def is_bad(scalar: Tensor) -> bool:
    """Say whether a scalar on the host is NaN or Inf; False if it is elsewhere."""
    value = host_value(scalar)
    return value is not None and not math.isfinite(value)


def broken_weight(model: nn.Module) -> Origin | None:
    """Return the first weight that is non-finite before the pass has begun."""
    for site, parameter_name, parameter in _parameters(model):
        if kind := kind_of(parameter):
            return Origin(
                direction="update",
                site=site,
                kind=kind,
                tensor="weight",
                parameter=_full_name(site, parameter_name),
            )
    return None


def broken_gradient(model: nn.Module) -> Origin | None:
    """Return the bad gradient nearest the loss: backward reaches it first."""
    for site, parameter_name, parameter in reversed(list(_parameters(model))):
        if parameter.grad is not None and (kind := kind_of(parameter.grad)):
            return Origin(
                direction="backward",
                site=site,
                kind=kind,
                tensor="gradient",
                parameter=_full_name(site, parameter_name),
            )
    return None


def broken_activation(model: nn.Module, loss: Tensor) -> Origin | None:
    """Return the first bad tensor that the forward pass saved for its backward.

    The site is the module whose parameters the operation used; an operation without
    parameters belongs to the last such module before it, named as what it follows.
    """
    owners: dict[int, list[str]] = {}
    for name, _, parameter in _parameters(model):
        owners.setdefault(id(parameter), []).append(name)
    before = ""
    for node in _in_forward_order(loss.grad_fn):
        users = _owners(node, owners)
        # A tied weight is first the embedding's, later the head's.
        site = users[-1 if before else 0] if users else None
        for name, saved in _saved(node):
            if id(saved) not in owners and (kind := kind_of(saved)):
                return _activation(
                    node, name, before if site is None else site, before, kind
                )
        before = before if site is None else site
    kind = kind_of(loss)
    return kind and Origin(direction="forward", site=before, kind=kind, tensor="loss")


def _activation(node: Any, name: str, site: str, before: str, kind: Kind) -> Origin:
    result = "result" in name or "output" in name
    return Origin(
        direction="forward",
        site=site,
        kind=kind,
        tensor="result" if result else "input",
        operation=node.name().removesuffix("0").removesuffix("Backward"),
        after=before if before != site and not result else "",
    )


def _full_name(site: str, parameter: str) -> str:
    return f"{site}.{parameter}" if site else parameter


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield (module, name, parameter) in the order of the modules."""
    for site, module in named(model):
        for name, parameter in module.named_parameters(recurse=False):
            yield site, name, parameter


def kind_of(x: Any) -> Kind | None:
    """Return what is wrong with a tensor's values, if anything."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return None
    x = local_part(x.detach())
    if x.untyped_storage().nbytes() == 0:  # FSDP took its memory back: nothing to see
        return None
    if bool(torch.isfinite(x).all()):
        return None
    return "NaN" if bool(torch.isnan(x).any()) else "Inf"


def _in_forward_order(root: Any) -> list[Any]:
    """Return the nodes of a graph as they were made; leaves come with their users."""
    seen: dict[Any, None] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.name().endswith("AccumulateGrad"):
            continue
        seen[node] = None
        waiting.extend(following for following, _ in node.next_functions)
    return sorted(seen, key=lambda node: node._sequence_nr())


def _owners(node: Any, owners: dict[int, list[str]]) -> list[str]:
    """Return the modules whose parameter an operation uses, directly or transposed."""
    for following, _ in node.next_functions:
        hops = 0
        while following is not None and hops < 3:
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                return owners.get(id(leaf), [])
            edges = following.next_functions
            following, hops = (edges[0][0], hops + 1) if len(edges) == 1 else (None, 3)
    return []


def _saved(node: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors a node saved, where looking does not recompute them."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        raw = getattr(node, name)
        parts = raw if isinstance(raw, list | tuple) else [raw]
        # Activation checkpointing would run the forward again to answer.
        if any(part is None or part.unpack_hook is not None for part in parts):
            continue
        # A function written in Python names them without the underscore.
        known = "saved_tensors" if name == "_raw_saved_tensors" else name[4:]
        saved = getattr(node, known)
        for tensor in saved if isinstance(saved, list | tuple) else [saved]:
            yield name, tensor


def first_bad_module(model: nn.Module, batch: Batch) -> Origin | None:
    """Return the first module, in the order they finish, whose output is non-finite."""
    found: list[Origin] = []

    def look(site: str, output: Any) -> None:
        for tensor in _tensors(output) if not found else ():
            if kind := kind_of(tensor):
                found.append(
                    Origin(direction="forward", site=site, kind=kind, tensor="output")
                )
                return

    # After the module's own hooks: one of them may have made it.
    handles = [
        module.register_forward_hook(lambda m, args, out, site=site: look(site, out))
        for site, module in named(model)
    ]
    try:
        batch.replay(model)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in _tensors(part)]
    return []


NEAR = 100
"""Steps: what breaks at one place again within so many is the same trouble."""


@dataclass(slots=True)
class Repeats:
    """Counts what breaks again and again at one place: reported once, then in tens."""

    _known: dict[tuple[str, str, Any], tuple[int, int, int]] = field(
        default_factory=dict
    )
    """Code, site, parameter → first step, last step, times."""

    def counted(self, found: Finding) -> list[Finding]:
        """Return the finding if it is new, its count at the 10th, 100th, … time."""
        key = found.code, found.site, found.params.get("parameter")
        first, last, times = self._known.get(key, (found.step, -NEAR, 0))
        if found.step - last >= NEAR:
            self._known[key] = found.step, found.step, 1
            return [found]
        self._known[key] = first, found.step, times + 1
        if math.log10(times + 1) % 1:
            return []
        params = {"times": times + 1, "first": first, "rank": found.params["rank"]}
        kind = found.params.get("kind", "NaN")
        code = "nonfinite.repeated"
        return [replace(found, code=code, params={**params, "kind": kind})]


@dataclass(slots=True)
class NonfiniteMonitor:
    """Reports once when numbers turn non-finite, and again after a recovery."""

    model: nn.Module
    rank: int = 0
    numbers: Literal["finite", "bad", "bad before"] = "finite"
    """In this step, or else in the one before: what is bad for long is reported once.
    """
    _last_bad: int = -1
    """The last step whose loss was seen to be bad."""
    _last_late: float = 0.0
    """The last loss that was read after its step."""
    stored: Callable[[], Batch | None] = lambda: None
    """The step's batch, where it is stored."""
    keep: Path | None = None
    """The run beside which a broken step is saved."""
    _found: list[Finding] = field(default_factory=list)
    _repeats: "Repeats" = field(default_factory=lambda: Repeats())

    @torch.no_grad()
    def check_loss(
        self, step: int, loss: Tensor | None, roots: Iterable[Tensor]
    ) -> None:
        """Look at a loss before its backward pass, from one root or several."""
        if loss is None or not is_bad(loss):
            return
        if self.numbers == "finite":
            activations = (broken_activation(self.model, root) for root in roots)
            origin = (
                broken_weight(self.model)
                or self._replay(step)
                or next(filter(None, activations), None)
            )
            self._report(step, origin)
        self.numbers, self._last_bad = "bad", step

    @torch.no_grad()
    def check_norm(self, step: int, norm: Tensor, *, scaled: bool) -> None:
        """Look at a gradient norm before it clips."""
        if not is_bad(norm):
            return
        if self.numbers == "finite":
            # A GradScaler finds its scale by overflowing now and then.
            if not scaled:
                self._replay(step)
            self._report(step, broken_gradient(self.model), expected=scaled)
        self.numbers = "bad"

    @torch.no_grad()
    def check_late(self, scalars: Iterable[Entry]) -> list[Finding]:
        """Look at losses that are read only now, after their step: on an accelerator.

        Their graph is gone; weights and gradients may still show where it began.
        """
        found = []
        for step, name, value in scalars:
            if name != "loss" or step <= self._last_bad:
                continue
            bad = not math.isfinite(value)
            if bad and math.isfinite(self._last_late):
                origin = broken_weight(self.model) or broken_gradient(self.model)
                found.append(origin_finding(step, origin, self.rank))
            self._last_late = value
            self._last_bad = step if bad else self._last_bad
        return found

    def pop(self) -> list[Finding]:
        """End a step: return what was found; report again after a good step."""
        found, self._found = self._found, []
        self.numbers = "bad before" if self.numbers == "bad" else "finite"
        return found

    def note_other_ranks(self, findings: list[Finding]) -> None:
        """Treat what another rank found as reported."""
        if any(finding.belongs_to("nonfinite") for finding in findings):
            self.numbers = "bad"

    def _replay(self, step: int) -> Origin | None:
        """Save the stored batch, run it once more, and see where it goes wrong."""
        batch = self.stored()
        # This rank may be the only one with a NaN: a pass that gathers weights would
        # wait for the others without end.
        if batch is None or needs_all_ranks(self.model):
            return None
        if self.keep is not None:
            save_step(bundle_path(self.keep, step), batch, unwrapped(self.model))
        return first_bad_module(self.model, batch)

    def _report(
        self, step: int, origin: Origin | None, *, expected: bool = False
    ) -> None:
        found = origin_finding(step, origin, self.rank, expected=expected)
        self._found += self._repeats.counted(found)


def origin_finding(
    step: int, origin: Origin | None, rank: int, *, expected: bool = False
) -> Finding:
    if origin is None:
        return Finding.error(step, "nonfinite.unknown", rank=rank)
    given: dict[str, Scalar] = {
        "kind": origin.kind,
        "direction": origin.direction,
        "case": origin.tensor,
    }
    if origin.parameter:
        given["parameter"] = origin.parameter
    if origin.operation:
        given |= {"operation": origin.operation, "after": origin.after}
    return Finding(
        step=step,
        severity="info" if expected else "error",
        code=f"nonfinite.{origin.direction}",
        site=origin.site,
        params={"rank": rank, **given},
    )
