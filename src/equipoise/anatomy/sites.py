"""What describes a model: module names, attention sites, projections, blocks, norms.

Module names are those the user wrote, whatever wraps the model: DDP, FSDP,
``torch.compile``, activation checkpointing or peft.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from equipoise.anatomy.sharding import local_part

Placement = Literal["pre", "post", "sandwich", ""]


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Rows that go group by group: the group's queries, its key, its value.

    One query per group is GPT-NeoX's and Bloom's layout; one group, Falcon-7B's.
    """

    groups: int
    queries: int
    """Query heads per group."""
    letter: str

    def rows(self, weight: Tensor) -> Tensor:
        """Return the rows of one letter from the whole fused matrix."""
        by_part: Tensor = weight.unflatten(0, (self.groups, self.queries + 2, -1))
        if self.letter == "q":
            return by_part[:, : self.queries].flatten(0, 2)
        return by_part[:, self.queries + (self.letter == "v")].flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Gated:
    """Rows that go head by head: the head's query, then its output gate."""

    groups: int
    """Query heads."""

    def rows(self, weight: Tensor) -> Tensor:
        """Return the queries' rows from the whole matrix."""
        by_head: Tensor = weight.unflatten(0, (self.groups, 2, -1))
        return by_head[:, 0].flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Weight:
    """One projection, as rows of a module's weight: fused and transposed ones too."""

    module: nn.Module
    attribute: str = "weight"
    transposed: bool = False
    """True where the module stores (in, out), as GPT-2's Conv1D does."""
    rows: slice | Interleaved | Gated | None = None
    """Which output rows belong to this projection; all of them by default."""
    local: bool = False
    """True for the part that tensor parallelism leaves on this rank."""

    def matrix(self) -> Tensor:
        """Return the (out, in) matrix as it is now; whole only where the module is."""
        weight = effective(self.module, self.attribute)
        return self.part_of(local_part(weight) if self.local else weight)

    def part_of(self, weight: Tensor) -> Tensor:
        """Return the (out, in) matrix of this projection from the stored tensor."""
        weight = weight.mT if self.transposed else weight
        if self.rows is None:
            return weight
        if isinstance(self.rows, slice):
            return weight[self.rows]
        return self.rows.rows(weight)


def stored(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module; None where asking for it would run code.

    A parametrised weight is computed anew whenever it is asked for: spectral_norm takes
    a step of its power iteration, others may draw random numbers.
    """
    return None if is_parametrized(module, name) else getattr(module, name, None)


def effective(module: nn.Module, attribute: str = "weight") -> Tensor:
    """Return the weight a module acts with: under LoRA, base and adapters together.

    peft keeps the user's layer as ``base_layer`` and adds the active adapters' update
    on the fly, unless it has merged them already or they are switched off. Of a packed
    weight (QLoRA) the codes are returned as they are: what they mean is not in the
    tensor.
    """
    base = getattr(module, "base_layer", None)
    if base is None:
        plain: Tensor = getattr(module, attribute).detach()
        return plain
    weight = effective(base, attribute)
    if not weight.is_floating_point():
        return weight
    lora: Any = module
    alone = lora.merged or lora.disable_adapters
    for adapter in () if alone else lora.active_adapters:
        if adapter in getattr(lora, "lora_A", ()):
            weight = weight + lora.get_delta_weight(adapter).detach()
    return weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """The four linear maps of one attention module, and how they split into heads."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight
    heads: int
    kv_heads: int

    def by_head(self, letter: Literal["q", "k", "v", "o"]) -> Tensor:
        """Return one map as (head, head width, model width), o's columns as rows.

        Query head h reads the key and value head h // (heads / kv_heads); their maps
        come once per query head.
        """
        weight: Weight = getattr(self, letter)
        matrix = weight.matrix().mT if letter == "o" else weight.matrix()
        heads = self.heads if letter in "qo" else self.kv_heads
        by_group: Tensor = matrix.unflatten(0, (heads, -1))
        if letter in "qo":
            return by_group
        return by_group.repeat_interleave(self.heads // self.kv_heads, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSite:
    """One module that calls attention."""

    name: str
    module: nn.Module
    layer: int | None = None
    projections: Projections | None = None
    declared: bool = False
    """From a family's table; otherwise guessed, or found only by its calls."""
    weights: str = "softmax"
    """What makes weights of scores, as the family declares it."""


class Reason(NamedTuple):
    """Why something is not read: data, of which ``text`` makes the sentence."""

    code: str
    """What a finding's code ends in: ``watch.unread.no_gradients``."""
    hides: tuple[str, ...] = ()
    """Readings that are missing, where not all of the site's are: ``gradient.*``."""
    kernel: str = ""
    detail: str = ""
    """How the kernel was called, where it is read otherwise."""

    @property
    def families(self) -> set[str]:
        """The families of readings it explains: ``gradient``."""
        return {name.partition(".")[0] for name in self.hides}


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A module that scores experts for each token, and the experts it scores."""

    module: nn.Module
    home: nn.Module
    """The module that calls the router, then the experts."""
    picks: int = 0
    """Experts per token by the model's own options; 0 where none tells."""
    experts: tuple[nn.Module, ...] = ()
    """What tokens are handed to: one module for all experts, then one each if any."""
    count: int = 0
    """How many experts there are; 0 where their modules do not tell."""
    bias: tuple[nn.Module, str] | None = None
    """The module and name of a bias that balances the choice and weighs nothing."""


MixerKind = Literal[
    "delta", "log decay", "heads", "channels", "fixed", "convolution", "unknown"
]
"""How a mixer without softmax forgets: by gates of a delta rule, by a module that
returns the decay's logarithm, by a step per head (Mamba-2) or per channel (Mamba), by
a rate that no token changes, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """A module that mixes tokens without a softmax."""

    module: nn.Module
    kind: MixerKind
    sources: Mapping[str, nn.Module] = field(default_factory=dict)
    """What is read of it → the part whose output makes it."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """What was met in one forward pass and could not be read, by site."""

    unread: dict[str, Reason] = field(default_factory=dict)
    """Sites whose calls were seen and could not be read: name → reason."""
    partial: dict[str, list[Reason]] = field(default_factory=dict)
    """Sites that are read except for something: name → what, and why."""
    missing: list[str] = field(default_factory=list)
    """Readings, such as ``residual.*``, that were due and did not come."""

    def add_partial(self, site: str, why: Reason) -> None:
        """Name once what cannot be read of a site that is read otherwise."""
        known = self.partial.setdefault(site, [])
        if why not in known:
            known.append(why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Everything the probes need to know about one model instance."""

    model: nn.Module
    names: Mapping[int, str]
    """id(module) → name."""
    attention: tuple[AttentionSite, ...]
    blocks: Mapping[str, nn.Module]
    """The blocks of the residual stream, first to last."""
    norms: Mapping[str, nn.Module]
    feedforwards: Mapping[str, nn.Module] = field(default_factory=dict)
    """The feed-forward modules of the blocks; several where a block holds the parts."""
    routers: Mapping[str, Router] = field(default_factory=dict)
    """The routers of mixtures of experts."""
    mixers: Mapping[str, Mixer] = field(default_factory=dict)
    """What mixes tokens without a softmax: recurrences and short convolutions."""
    placement: Placement = ""
    """Where the norms of a block are; ``post`` means each closes a residual sum."""
    family: str = ""
    guessed: tuple[str, ...] = field(default=())
    """What was guessed rather than declared, in words for the user."""

    def site(self, module: nn.Module) -> AttentionSite | None:
        """Return the site of a module, if it is one we expected."""
        return next((s for s in self.attention if s.module is module), None)


# Wrapper class → the attribute that holds the user's module. By name: torch.compile,
# DDP and FSDP need not be imported to be recognised.
WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "LoraModel": "model",
}
PEFT = "PeftModel"  # PeftModelForCausalLM and its like


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's own module under any number of wrappers."""
    while (attribute := _held_as(type(module).__name__)) is not None:
        module = getattr(module, attribute)
    return module


@lru_cache
def _held_as(wrapper: str) -> str | None:
    return "base_model" if wrapper.startswith(PEFT) else WRAPPERS.get(wrapper)


def named(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield ``named_modules()`` with the wrappers' own names left out.

    Example:
        >>> wrapped = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
        >>> [name for name, _ in named(wrapped)]
        ['', '0']
    """
    seen: set[int] = set()
    waiting = [(prefix, unwrapped(model))]
    while waiting:  # a generator within a generator would pass each name up again
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        inside = f"{name}." if name else ""
        children = reversed(module._modules.items())
        waiting += [(inside + n, unwrapped(m)) for n, m in children if m is not None]
