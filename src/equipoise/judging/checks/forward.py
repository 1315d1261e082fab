"""Checks of the forward pass."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from equipoise.judging.checks.registry import Violation, finds, violated
from equipoise.judging.facts import Facts

FEW = 16
"""Targets below which a match with the inputs may be chance: one token of ten that a
masked model leaves as it is would match them all once in 10¹⁶ batches."""
AHEAD = (1, 2)
"""How far ahead of its row a target may lie."""

Sites = Mapping[str, Mapping[str, Any]]


def _sites(facts: Sequence[Facts]) -> Sites:
    sites: Sites = facts[-1].section("forward").get("sites", {})
    return sites


def shift_of(facts: Sequence[Facts]) -> int | None:
    """Return how far ahead every target is found in the input; None if not sure.

    Every one: where an input was masked or noised, what is ahead is not the target.
    """
    targets = facts[-1].section("forward").get("targets", {})
    found = [
        shift
        for shift in AHEAD
        if FEW <= targets.get(f"asked_{shift}", 0) == targets.get(f"met_{shift}")
    ]
    return found[0] if len(found) == 1 else None


def _together(places: Mapping[str, Mapping[str, Any]]) -> list[Violation]:
    """Return one violation for all layers: the first, and how many there are."""
    first = next(iter(places.items()), None)
    if first is None:
        return []
    shown = {k: v for k, v in first[1].items() if not isinstance(v, bool)}
    return [violated(first[0], places=places, sites=len(places), **shown)]


def _leaking(facts: Sequence[Facts]) -> dict[str, dict[str, Any]] | None:
    """Return each site at which counted rows see their target; None if not sure."""
    shift = shift_of(facts)
    if shift is None:
        return None
    found = {}
    for name, site in _sites(facts).items():
        if told := site.get(f"sees_target_{shift}", 0):
            rows = site[f"has_past_{shift}"]
            hidden = FEW <= rows == site[f"sees_no_past_{shift}"]
            asked = facts[-1].section("forward")["targets"][f"asked_{shift}"]
            found[name] = {"rows": told, "of": asked, "backwards": hidden}
    return found


@finds("check.sees_target")
def sees_target(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """A counted row sees the key of the token that it is to predict."""
    leaking = _leaking(facts)
    if leaking is None:
        return None
    return _together({n: x for n, x in leaking.items() if not x["backwards"]})


@finds("check.mask_sign")
def mask_sign(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Rows see only what a mask should hide: the future, or padding."""
    leaking = _leaking(facts)
    padding = _to_padding(facts)
    if leaking is None and padding is None:
        return None
    backwards = {n: x for n, x in (leaking or {}).items() if x["backwards"]}
    alone = {n: x for n, x in (padding or {}).items() if x["alone"]}
    for case, places in (("future", backwards), ("padding", alone)):
        if places:
            return _together({n: {**x, "case": case} for n, x in places.items()})
    return []


def _to_padding(facts: Sequence[Facts]) -> dict[str, dict[str, Any]] | None:
    """Return each site at which real tokens see padding; None if there is none.

    Batches that are padded are so nearly always: a declared id, which is 0 in many a
    configuration, may be text where it looks like padding in few samples of many.
    """
    often = sum(_is_padded(one) for one in facts)
    sure = often >= 2 and 4 * often >= len(facts)
    sites = _sites(facts).items()
    padded = {
        n: s for n, s in sites if s.get("padding", 0) and (sure or not s["declared"])
    }
    if not padded:
        return None
    found = {}
    for name, site in padded.items():
        if rows := site["to_padding"]:
            alone = rows == site["padding_only"]
            found[name] = {"rows": rows, "padding": site["padding"], "alone": alone}
    return found


def _is_padded(facts: Facts) -> bool:
    sites = facts.section("forward").get("sites", {}).values()
    return any(site.get("padding", 0) for site in sites)


@finds("check.padding_attended")
def padding_attended(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Real tokens see keys of padding."""
    found = _to_padding(facts)
    if found is None:
        return None
    return _together({n: x for n, x in found.items() if not x["alone"]})


@finds("check.masked_row")
def masked_row(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """A row that counts in the loss sees no key at all."""
    asked = {n: s for n, s in _sites(facts).items() if "counted_blind" in s}
    if not asked:
        return None
    blind = {n: s["counted_blind"] for n, s in asked.items() if s["counted_blind"]}
    return _together({n: {"rows": count} for n, count in blind.items()})


@finds("check.softmax_axis")
def softmax_axis(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Weights that sum to 1 over the queries mix the values as they are."""
    sites = facts[-1].section("forward").get("other_axis", {})
    return _together({name: {} for name, as_it_is in sites.items() if as_it_is})


@finds("check.positions")
def positions(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """All tokens of every sequence are given one position."""
    given = facts[-1].section("forward").get("places", {})
    known = {name: places for name, places in given.items() if places["own"]}
    if not known:
        return None
    return [
        violated(name, tokens=places["tokens"], place=places["last"])
        for name, places in known.items()
        if places["spread"] == 0
    ] + [
        violated(name, case="beyond", tokens=beyond, place=places["last"])
        for name, places in known.items()
        if (beyond := places.get("clamped", 0))
    ]


@finds("check.rotary_precision")
def rotary_precision(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Angles are rounded to 8 or 11 bits before their sine is taken."""
    angles = facts[-1].section("forward").get("angles")
    stored = facts[-1].section("forward").get("frequencies", {})
    if stored:
        return _together({n: {"dtype": d, "case": "stored"} for n, d in stored.items()})
    if angles is None:
        return None
    half = {n: d for n, d in angles.items() if d in ("float16", "bfloat16")}
    return _together({name: {"dtype": dtype} for name, dtype in half.items()})


@finds("check.detached")
def detached(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """The graph ends before a block, and what lies before gets no gradient.

    Not where the backward pass comes there with zeros: a map that starts at zero lets
    nothing through yet.
    """
    cuts = facts[-1].section("forward").get("cuts", {})
    behind = {n: c for n, c in cuts.items() if c["weights"] and not c.get("reached")}
    starved = {n: c for n, c in behind.items() if not c["moved"]}
    shown = {n: {"before": c["before"] or "the embeddings"} for n, c in starved.items()}
    return _together(shown)


@finds("check.eval_mode")
def eval_mode(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """The model is trained as it would be evaluated, with all of its dropout off."""
    model = facts[-1].section("model")
    if not model.get("trained"):
        return None
    off = not model["training"] and model["dropout_idle"] and not model["dropout"]
    return [violated(layers=model["dropout_idle"])] if off else []


@finds("check.dropout_in_eval")
def dropout_in_eval(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Passes without gradients, of inputs that are not trained on, drop numbers.

    Not decided from the first sample: what runs before it may be a trial.
    """
    model, tried = facts[-1].section("model"), facts[-1].section("influence")
    if tried.get("tried") and tried.get("dropped") and tried["repeated"] > 0:
        # By a function that is not told the mode: no module shows it.
        return [violated(case="function", moved=tried["repeated"])]
    passes = model.get("passes", ())
    evaluations = [one for one in passes if not one["graded"]]
    if len(facts) == 1 or not evaluations or model.get("batch_norm"):
        return None
    # Passes over one batch again are meant: gradients in two turns (GradCache), or
    # dropout as a sample of models (MC dropout).
    seen = [tuple(one["inputs"]) for one in passes]
    alone = [one for one in evaluations if seen.count(tuple(one["inputs"])) == 1]
    if not alone:
        return None
    dropping = [one for one in alone if one["training"] and one["dropout"]]
    if not dropping:
        return []
    return [violated(passes=len(dropping), layers=dropping[0]["dropout"])]


@finds("check.autocast_inactive")
def autocast_inactive(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Autocast was entered, and no product of the pass came out in its format."""
    cast = facts[-1].section("model").get("autocast")
    if cast is None:
        return None
    if cast["cast"]:
        return []
    return [violated(products=cast["products"], dtype=cast["wanted"])]
