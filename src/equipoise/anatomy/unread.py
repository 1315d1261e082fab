"""What could not be read, by name, with the reason and the next thing to try."""

import inspect
import sys
from collections.abc import Collection, Container, Mapping
from types import CodeType

from torch import nn

from equipoise.anatomy.sites import Anatomy, Gaps

# Attention implementations of Hugging Face whose kernels return no scores.
FLASH = ("flash", "sage", "paged", "kernels-community")
FOREIGN = ("flash_attn", "xformers", "sageattention", "transformer_engine", "fla")
SWITCH = "choose sdpa or eager attention to read it"
NONE_SEEN = (
    "no softmax over scores and no fused attention was seen while it ran: linear "
    "attention, weights made by another function (sigmoid, ReLU, sparsemax, Gumbel), a "
    "softmax written out by hand, or code that was scripted or compiled before"
)
NONE_AT_ALL = (
    "no attention was met: what needs attention is not read, all else is (loss, "
    "gradients, norms, updates)"
)


def unread(
    anatomy: Anatomy, read: Container[str], gaps: Gaps | None = None
) -> dict[str, str]:
    """Return every attention site that was not read: name → why.

    ``read`` are the names of sites whose calls were read in a step. Calls that were
    seen outside any known site and could not be read, the step's ``gaps``, are listed
    as well.
    """
    missing = [site for site in anatomy.attention if site.name not in read]
    reasons = {site.name: _reason(site.module) for site in missing}
    seen = gaps.unread if gaps is not None else {}
    return {**reasons, **{n: why for n, why in seen.items() if n not in read}}


def unread_in_step(
    anatomy: Anatomy, ran: Collection[str], read: Collection[str], gaps: Gaps
) -> dict[str, str]:
    """Return the guessed sites that ran in a step and were not read: name → why.

    Declared sites are not among them: those must be read. Nor is a guess whose
    attention was read in a module inside it, or around it.
    """
    if not read and not anatomy.attention and not gaps.unread:
        return {"": NONE_AT_ALL}
    guessed = [s for s in anatomy.attention if not s.declared and s.name in ran]
    return {s.name: _reason(s.module) for s in guessed if not _covered(s.name, read)}


def _covered(site: str, read: Collection[str]) -> bool:
    around = [name for name in read if name and f"{site}.".startswith(f"{name}.")]
    return site in read or bool(around) or any(n.startswith(f"{site}.") for n in read)


def _reason(module: nn.Module) -> str:
    implementation = _implementation(module)
    if implementation.startswith(FLASH):
        return f"attn_implementation={implementation!r} returns no scores; {SWITCH}"
    kernel = _foreign(_code(module), _globals(module))
    if kernel:
        return f"it calls {kernel}, which returns no scores; {SWITCH}"
    if "linear" in f"{type(module).__name__} {_kind(module)}".lower():
        return "linear attention has no softmax over scores"
    return NONE_SEEN


def _code(module: nn.Module) -> CodeType | None:
    """Return the code of a module's forward; a scripted one has none."""
    forward = inspect.unwrap(type(module).forward)
    return getattr(forward, "__code__", None)


def _implementation(module: nn.Module) -> str:
    return str(getattr(getattr(module, "config", None), "_attn_implementation", ""))


def _kind(module: nn.Module) -> str:
    """Return what a module's configuration says its attention is, as our lab's does."""
    return str(getattr(getattr(module, "config", None), "attention", ""))


def _globals(module: nn.Module) -> Mapping[str, object]:
    home = inspect.getmodule(type(module)) or sys.modules.get(type(module).__module__)
    return vars(home) if home is not None else {}


def _foreign(code: CodeType | None, names: Mapping[str, object]) -> str:
    """Return the foreign kernel a function names, by where its globals come from."""
    for name in code.co_names if code else ():
        home = str(getattr(names.get(name), "__module__", "") or "")
        if home.partition(".")[0] in FOREIGN:
            return f"{home}.{name}"
    return ""
