"""Compare a model directory's tensors with what its ``config.json`` declares.

Where transformers knows the class, it is asked: the model is made without memory, and
the files' names and shapes are matched as loading would match them, renames, tied
weights and packs included. Elsewhere the numbers of the configuration must hold: how
many layers there are, and which numbers they have.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from equipoise.auditing.subject import UNPICKLING
from equipoise.auditing.weights.checkpoint import INDEXES, WHOLE, read_json
from equipoise.auditing.weights.entries import Checkpoint, printable
from equipoise.records import Finding, Scalar

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
NEXT = ("num_nextn_predict_layers", "num_mtp_layers")
"""Layers behind the last one, which predict tokens further on."""
NUMBERED = re.compile(r"^(.*?)\.(\d+)\.")
RAISED = (OSError, SafetensorError, AssertionError, ArithmeticError, *UNPICKLING)
"""What a stranger's files make transformers raise."""
MOST_PARTS = 4096
"""Layers or experts of a class that is made: a stranger's file may declare billions."""
LOADED = (*INDEXES, *WHOLE[:2])
"""What transformers itself would load from a directory."""
INPUTS = re.compile(
    r"(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight$"
)
OUTPUTS = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """How a checkpoint differs from what its configuration declares."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    misshapen: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    """Name, shape in the file, shape declared."""
    by: str = ""
    """What was asked: a class of transformers, or the configuration's numbers."""

    def findings(self) -> list[Finding]:
        found = []
        if self.missing:
            # A head or a pooler is often started again on purpose; a layer is not.
            grave = any(NUMBERED.match(f"{name}.") for name in self.missing)
            severity = "error" if grave else "warn"
            found.append(_finding(severity, "weights.missing", self.missing, self.by))
        for name, stored, declared in self.misshapen[:8]:
            shapes = {"stored": _shape(stored), "declared": _shape(declared)}
            site = printable(name)
            found.append(
                Finding.error(0, "weights.misshapen", site=site, by=self.by, **shapes)
            )
        layers = tuple(name for name in self.extra if NUMBERED.match(name))
        if layers:
            found.append(_finding("warn", "weights.extra", layers, self.by))
        return found


def _finding(severity: Any, code: str, names: Sequence[str], by: str) -> Finding:
    first = printable(names[0])
    params: dict[str, Scalar] = {"count": len(names), "first": first, "by": by}
    return Finding(step=0, severity=severity, code=code, site=first, params=params)


def _shape(sizes: Sequence[int]) -> str:
    return " × ".join(map(str, sizes)) or "one number"


def compared(checkpoint: Checkpoint, path: Path) -> tuple[list[Finding], list[str]]:
    """Return what differs from the configuration beside a path, and facts about it."""
    if not checkpoint.config:
        return [], []
    found, why = _by_transformers(path), ""
    if isinstance(found, str):
        why, found = found, _by_numbers(checkpoint)
    findings = [*found.findings(), *_untied(checkpoint)]
    if found.by:
        facts = [f"compared with {found.by}: names and shapes" + why]
        return findings, facts
    return findings, [f"names and shapes were not compared with config.json{why}"]


def _by_transformers(path: Path) -> Differences | str:
    """Return what loading would miss; else why transformers was not asked, in words."""
    folder = path if path.is_dir() else path.parent
    alone = not path.is_dir() and path.name not in LOADED
    if alone or not (folder / "config.json").is_file():
        return ""
    if not any((folder / name).is_file() for name in LOADED):
        return ""
    kind = _class_of(read_json(folder / "config.json"))
    return kind if isinstance(kind, str) else _matched(kind, folder)


def _class_of(config: Mapping[str, Any]) -> Any:
    """Return the class that a configuration names; else why there is none, in words."""
    try:
        import transformers
    except ImportError:
        return " (install transformers to have all compared)"
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    kind = getattr(transformers, name, None) if name.isidentifier() else None
    if not hasattr(kind, "from_pretrained"):
        return f" (transformers has no class {printable(name)!r})"
    if max(_counts(config), default=0) > MOST_PARTS:
        return " (it declares more layers than any model has)"
    return kind


def _matched(kind: Any, folder: Path) -> Differences | str:
    """Match a directory's files with a class as loading would, without memory."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    options |= {"device_map": "meta", "ignore_mismatched_sizes": True}
    try:
        with _quiet():
            _, told = kind.from_pretrained(folder, output_loading_info=True, **options)
    except RAISED as error:
        return f" (transformers cannot match it: {type(error).__name__})"
    return _differences(told, f"transformers' {kind.__name__}")


def _counts(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield how many layers, experts and the like a configuration declares."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _counts(value)
        elif isinstance(value, int) and re.search("layer|expert|depth|block", name):
            yield value


def _differences(told: Mapping[str, Any], by: str) -> Differences:
    misshapen = tuple(
        (name, tuple(stored), tuple(declared))
        for name, stored, declared in told.get("mismatched_keys", ())
    )
    wrong = {name for name, *_ in misshapen}
    return Differences(
        missing=tuple(sorted(set(told.get("missing_keys", ())) - wrong)),
        extra=tuple(sorted(told.get("unexpected_keys", ()))),
        misshapen=misshapen,
        by=by,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's own report and bars off the screen; random streams stay."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _by_numbers(checkpoint: Checkpoint) -> Differences:
    """Return layers that are missing or too many, where they are counted."""
    config = checkpoint.config
    count = next((config[k] for k in LAYERS if type(config.get(k)) is int), None)
    after = sum(config[k] for k in NEXT if type(config.get(k)) is int)
    stacks: dict[str, set[int]] = {}
    for name in checkpoint.entries:
        if at := NUMBERED.match(name):
            stacks.setdefault(at[1], set()).add(int(at[2]))
    if not stacks or not count or count > 100_000:
        return Differences()
    # The deepest stack; a model of several (encoder, decoder) counts them elsewhere.
    stem, numbers = max(stacks.items(), key=lambda item: len(item[1]))
    several = sum(len(own) >= max(2, len(numbers) // 2) for own in stacks.values()) > 1
    if several:
        return Differences()
    missing = sorted(set(range(count)) - numbers)
    extra = sorted(n for n in numbers if n >= count + after)
    return Differences(
        missing=tuple(f"{stem}.{n}" for n in missing),
        extra=tuple(f"{stem}.{n}.*" for n in extra),
        by=f"config.json, which declares {count} layers",
    )


def _untied(checkpoint: Checkpoint) -> list[Finding]:
    """Find two stored matrices that the configuration says are one."""
    if checkpoint.config.get("tie_word_embeddings") is not True:
        return []
    first = [n for n in checkpoint.entries if INPUTS.search(n)]
    last = [n for n in checkpoint.entries if OUTPUTS.search(n)]
    if len(first) != 1 or len(last) != 1 or _equal(checkpoint, first[0], last[0]):
        return []
    names = {"first": printable(first[0]), "by": "config.json"}
    site = printable(last[0])
    return [Finding.warn(0, "weights.untied", site=site, **names)]


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    entries = checkpoint.entries
    if entries[one].shape != entries[other].shape or not entries[one].is_float:
        return entries[one].shape == entries[other].shape
    pairs = zip(checkpoint.chunks(one), checkpoint.chunks(other), strict=True)
    return all(torch.equal(a.float(), b.float()) for a, b in pairs)
