"""Finds the modules of a block that mix tokens without softmax attention.

A mixer is found by the parts that only convolution and recurrence have, by the name of
its class, or because nothing else of its block can mix tokens.
"""

import re
from collections.abc import Collection, Mapping

from torch import nn

from equipoise.anatomy.discovery import RECURRENT
from equipoise.anatomy.sites import Anatomy

STATES = ("A_log", "dt_bias", "time_decay", "log_A", "decay")
"""Parameters that only a recurrence has."""
NAMED = re.compile(
    r"mamba|ssm|rwkv|time_?mix|retention|retnet|delta_?(net|rule)|linear_?att|kda"
    r"|hyena|hgrn|gated_?linear_?att|lightning_?att|recurrent|rg_?lru|short_?conv"
    r"|fourier|mixer$",
    re.IGNORECASE,
)
"""Class names of mixers without softmax."""
PER_TOKEN = re.compile(
    r"mlp|ffn|feed_?forward|moe|expert|dense|router|gate$|norm|ffw", re.IGNORECASE
)
"""Class names of parts that treat each token alone."""
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[0-9]+")


def mixers(anatomy: Anatomy, attending: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return the modules that mix tokens without softmax, by name.

    ``attending`` are the names of modules in which attention was read: none of them,
    and nothing that holds one, is a mixer.
    """
    attention = [*attending, *(site.name for site in anatomy.attention)]
    found: dict[str, nn.Module] = {}
    for name, block in anatomy.blocks.items():
        children = _candidates(anatomy, name, block, attention)
        sure = {n: m for n, m in children.items() if _is_mixer(m)}
        found |= sure or _only_choice(name, children, attention, anatomy)
    known = {
        name: mixer.module
        for name, mixer in anatomy.mixers.items()
        if not any(_touches(name, site) for site in attention)
    }
    outer = {n: m for n, m in found.items() if not any(_touches(n, k) for k in known)}
    return outer | known


def _candidates(
    anatomy: Anatomy, name: str, block: nn.Module, attention: Collection[str]
) -> dict[str, nn.Module]:
    """Return the children of a block that hold weights and are nothing known."""
    children = {f"{name}.{n}".lstrip("."): m for n, m in block.named_children()}
    return {
        n: m
        for n, m in children.items()
        if n not in anatomy.norms
        and not any(_touches(n, site) for site in attention)
        and any(True for _ in m.parameters())
    }


def _touches(name: str, site: str) -> bool:
    """Return whether one of the two is, or holds, the other."""
    a, b = f"{name}.", f"{site.partition('#')[0]}."
    return a.startswith(b) or b.startswith(a)


def _is_mixer(module: nn.Module) -> bool:
    own = {*module._parameters, *module._modules, *module._buffers}
    if isinstance(module, nn.RNNBase) or own & {*STATES}:
        return True
    # A model's own name may be in that of every part: RecurrentGemmaMlp.
    if NAMED.search(type(module).__name__) and not _is_per_token(module):
        return True
    parts = (getattr(module, part, None) for part in RECURRENT)
    mixes = any(part is not None and not _is_pointwise(part) for part in parts)
    return mixes and not _is_per_token(module)


def _is_per_token(module: nn.Module) -> bool:
    """Return whether a class is named so, its model's name left out.

    >>> Lfm2MoeShortConv = type("Lfm2MoeShortConv", (nn.Module,), {})
    >>> SparseMoeBlock = type("Lfm2MoeSparseMoeBlock", (nn.Module,), {})
    >>> _is_per_token(Lfm2MoeShortConv()), _is_per_token(SparseMoeBlock())
    (False, True)
    """
    last = "".join(WORDS.findall(type(module).__name__)[-2:])
    return bool(PER_TOKEN.search(last))


def _is_pointwise(part: object) -> bool:
    """Return whether a convolution sees one token at a time, as a linear map does."""
    return isinstance(part, nn.Conv1d | nn.Conv2d) and set(part.kernel_size) == {1}


def _only_choice(
    block: str,
    children: Mapping[str, nn.Module],
    attention: Collection[str],
    anatomy: Anatomy,
) -> dict[str, nn.Module]:
    """Return the one child that must mix tokens, in a block where nothing else can.

    Only in a model that attends elsewhere: blocks of a convolutional net mix in every
    child, and a stack of feed-forward nets in none.
    """
    if not attention or any(_touches(block, site) for site in attention):
        return {}
    beside = {
        n: m
        for n, m in children.items()
        if n not in anatomy.feedforwards and not _is_per_token(m)
    }
    known = any(name in anatomy.feedforwards for name in _children(anatomy, block))
    return beside if len(beside) == 1 and known else {}


def _children(anatomy: Anatomy, block: str) -> list[str]:
    return [f"{block}.{name}" for name, _ in anatomy.blocks[block].named_children()]
