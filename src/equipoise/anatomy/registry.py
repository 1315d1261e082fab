"""From a model to its anatomy: declared families first, guesses second."""

from collections.abc import Mapping

from torch import nn

from equipoise.anatomy import guess, tables
from equipoise.anatomy.families import (
    FAMILIES,
    Block,
    Declaration,
    Fused,
    Paired,
    Separate,
    declared,
)
from equipoise.anatomy.names import named, unwrapped
from equipoise.anatomy.paths import Place
from equipoise.anatomy.projecting import projections
from equipoise.anatomy.sites import Anatomy, AttentionSite, Placement

NORMS = ("LayerNorm", "RMSNorm")
LAYOUTS = (Separate, Fused, Paired)
tables.fill(FAMILIES)


def anatomy_of(model: nn.Module) -> Anatomy:
    """Return where a model's attention, residual stream and norms are."""
    modules = dict(named(model))
    blocks, found, guessed = _blocks(modules)
    sites = tuple(
        s
        for name in modules
        if (s := _site(Place(name, modules[name], modules), blocks))
    )
    norms = {n: m for n, m in modules.items() if type(m).__name__.endswith(NORMS)}
    placement, placed = _placement(blocks, found, norms)
    return Anatomy(
        model=model,
        names={id(module): name for name, module in modules.items()},
        attention=sites,
        blocks=blocks,
        norms=norms,
        feedforwards=_feedforwards(modules, blocks, found),
        routers=_routers(modules, blocks, found),
        placement=placement,
        family=type(unwrapped(model)).__name__,
        guessed=tuple(
            [f"projections of {s.name}" for s in sites if not s.declared]
            + ["blocks of the residual stream"] * guessed
            + ["where the norms stand"] * (not placed)
        ),
    )


def _declaration(place: Place, kinds: tuple[type, ...]) -> Declaration | None:
    known = declared(type(place.module).__name__)
    fitting = (d for d in known if isinstance(d, kinds) and place.fits(d))
    return next(fitting, None)


def _site(place: Place, blocks: Mapping[str, nn.Module]) -> AttentionSite | None:
    known = _declaration(place, LAYOUTS)
    layout = known or guess.layout(place)
    if layout is None or isinstance(layout, Block):
        return None
    return AttentionSite(
        name=place.name,
        module=place.module,
        layer=next((i for i, b in enumerate(blocks) if _within(place.name, b)), None),
        projections=projections(place, layout),
        declared=known is not None,
    )


def _blocks(
    modules: Mapping[str, nn.Module],
) -> tuple[dict[str, nn.Module], dict[str, Block], bool]:
    """Return the stations, the declarations of some, and whether any was guessed."""
    found: dict[str, Block] = {}
    for name, module in modules.items():
        known = _declaration(Place(name, module, modules), (Block,))
        if isinstance(known, Block):
            found[name] = known
    sites = [n for n in modules if _is_attention(Place(n, modules[n], modules))]
    rest = [s for s in sites if not any(_within(s, block) for block in found)]
    guessed = {} if found and not rest else guess.stacks(modules, rest)
    if found:
        guessed = {n: m for n, m in guessed.items() if any(_within(s, n) for s in rest)}
    chosen = {n: modules[n] for n in modules if n in found or n in guessed}
    return chosen, found, bool(guessed)


def _is_attention(place: Place) -> bool:
    declared = _declaration(place, LAYOUTS)
    return declared is not None or guess.layout(place) is not None


def _placement(
    blocks: Mapping[str, nn.Module],
    found: Mapping[str, Block],
    norms: Mapping[str, nn.Module],
) -> tuple[Placement, bool]:
    """Return the first block's placement, and whether it was declared."""
    for name, block in blocks.items():
        if name in found:
            said = found[name].placement
            return (said(block) if callable(said) else said), True
        return guess.placement(name, block, norms), False
    return "", True


def _feedforwards(
    modules: Mapping[str, nn.Module],
    blocks: Mapping[str, nn.Module],
    found: Mapping[str, Block],
) -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        if name not in found:
            made |= guess.feedforwards(name, block)
            continue
        place = Place(name, block, modules)
        made |= dict(at for p in found[name].feedforward if (at := place.follow(p)))
    return made


def _routers(
    modules: Mapping[str, nn.Module],
    blocks: Mapping[str, nn.Module],
    found: Mapping[str, Block],
) -> dict[str, tuple[nn.Module, int]]:
    made = guess.routers(modules)
    for name in blocks:
        if name in found and found[name].router:
            at = Place(name, blocks[name], modules).follow(found[name].router)
            assert at is not None  # a declaration that fits has its router
            made[at[0]] = at[1], guess.picks(at[1], modules[at[0].rpartition(".")[0]])
    return made


def _within(name: str, block: str) -> bool:
    return f"{name}.".startswith(f"{block}.") or block == ""
