"""Statements: what follows from the facts of a section, for the card to show.

A reader states counts; the card shows what they come to: at which shift labels and
inputs meet, which share of the targets is ignored, how the rate moves. No threshold is
in here but how many targets must agree before a shift is stated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from equipoise.judging.facts import Section

LEAST_TARGETS = 16
"""Targets that must all agree before a shift is stated."""
Json = dict[str, Any]


def stated(name: str, sections: Mapping[str, Section]) -> Section:
    """Return a section with what follows from it.

    >>> call = {"targets": 64, "counted": 48.0}
    >>> stated("loss", {"loss": {"calls": [call]}})["ignored"]
    0.25
    """
    section = sections.get(name, {})
    follows = STATEMENTS.get(name)
    if follows is None:
        return section
    found: Json = {}
    for make in follows:
        # Facts of another version, or from a damaged file, may have another shape.
        try:
            found |= make(sections)
        except (LookupError, TypeError, ValueError, AttributeError):
            continue
    return {**section, **{k: v for k, v in found.items() if v is not None}}


def _calls(sections: Mapping[str, Section]) -> Sequence[Section]:
    return list(sections["loss"]["calls"])


def _loss(sections: Mapping[str, Section]) -> Json:
    """The loss that is trained: its first call, and the share it ignores."""
    calls = _calls(sections)
    first = calls[0]
    names = ("function", "given", "reduction", "classes", "value", "uniform")
    found = {key: first.get(key) for key in (*names, "smoothing")}
    counted = [c for c in calls if "counted" in c and c.get("targets")]
    targets = sum(c["targets"] for c in counted)
    if targets:
        ignored = 1 - sum(c["counted"] for c in counted) / targets
        found |= {"targets": targets, "ignored": max(0.0, ignored)}
    return found


def _shift(sections: Mapping[str, Section]) -> Json:
    """The one shift at which every counted target is an input, where there is one."""
    shifts = {shift for call in _calls(sections) for shift in _meeting(call)}
    return {"shift": next(iter(shifts))} if len(shifts) == 1 else {}


def _meeting(call: Section) -> Iterator[int]:
    for table in call.get("meets", ()):
        columns = zip(table["shifts"], table["compared"], table["equal"], strict=True)
        whole = [int(s) for s, n, same in columns if n >= LEAST_TARGETS and n == same]
        if len(whole) == 1:
            yield whole[0]


def _ends(sections: Mapping[str, Section]) -> Json:
    """How many documents ended in the batch, and how many ends are targets."""
    found = [call["ends"] for call in _calls(sections) if "ends" in call]
    documents = sum(one["documents"] for one in found)
    ends = sum(one["targets"] for one in found)
    return {"ended": documents, "end_targets": ends} if documents else {}


def _weights_of_passes(sections: Mapping[str, Section]) -> Json:
    """What the weights of the micro-batches add up to, where each has one loss."""
    calls = _calls(sections)
    passes = sections["loss"]["passes"]
    weights = [call["weight"] for call in calls]
    if passes < 2 or len(weights) != passes:
        return {}
    return {"micro_weights": sum(weights)}


def _auxiliary(sections: Mapping[str, Section]) -> Json:
    """Names of losses beside the main one, in the graph of the loss or out of it."""
    given = sections["loss"]["auxiliary"]
    inside = {name: _is_part(one) for name, one in given.items()}
    return {
        "auxiliary_in": [name for name, part in inside.items() if part] or None,
        "auxiliary_out": [name for name, part in inside.items() if part is False]
        or None,
    }


def _is_part(one: Any) -> Any:
    return one.get("part") if isinstance(one, Mapping) else one


def _model(sections: Mapping[str, Section]) -> Json:
    """How much is trained, of which groups, and in which formats."""
    model = sections["model"]
    total = model["parameters"]
    groups = [
        {"name": name, "all": one["all"], "trainable": one["trainable"]}
        for name, one in model["groups"].items()
    ]
    some = [one for one in groups if one["trainable"] < one["all"]]
    frozen = [one["name"] for one in groups if not one["trainable"] and one["all"]]
    shares = ((n, size / total) for n, size in model["dtypes"].items())
    return {
        "trainable_share": model["trainable"] / total,
        "is_partial": bool(some),
        "group_list": [f"{one['name']} {_short(one['all'])}" for one in groups],
        "frozen_groups": frozen or None,
        "formats": [n if s > 0.999 else f"{n} {100 * s:.3g} %" for n, s in shares],
    }


def _short(count: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g}"


def _modes(sections: Mapping[str, Section]) -> Json:
    model = sections["model"]
    return {"mode": "training" if model["training"] else "evaluation"}


def _ties(sections: Mapping[str, Section]) -> Json:
    """Which weights are one, under several names."""
    ties = [" = ".join(names) for names in sections["weights"]["ties"]]
    return {"tied": ties or None}


def _attending(sections: Mapping[str, Section]) -> Json:
    """How attention looks: only back, to both sides, or within a window."""
    sites = list(sections["forward"]["sites"].values())
    looks = [_look(site) for site in sites]
    kinds = _counted(site["kind"] for site in sites)
    return {"looks": _listed(_counted(filter(None, looks))), "kernels": _listed(kinds)}


def _look(site: Section) -> str:
    """Return which other places the rows of one site see."""
    if "ahead" not in site:
        return ""
    keys = site["shape"][-1]
    if site["ahead"] > 0:
        return "both sides"
    if site["behind"] >= site.get("last_row", keys - 1):
        return "causal"  # the last row that was looked at sees the first key
    return f"causal within {site['behind'] + 1:.0f} tokens"


def _counted(words: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return found


def _listed(counts: Mapping[str, int]) -> list[str] | None:
    return [f"{word} in {n}" for word, n in counts.items()] or None


def _optimizers(sections: Mapping[str, Section]) -> Json:
    """Each optimiser in one item: groups, rates, decays, moments."""
    found = []
    for one in sections["optimizers"]["each"]:
        groups = one["groups"]
        rates = list(
            dict.fromkeys(g["rate"] for g in groups if g.get("rate") is not None)
        )
        decays = list(dict.fromkeys(g["decay"] for g in groups if "decay" in g))
        moments = one.get("moments", {})
        found.append(
            {
                "class": one["class"],
                "parameters": one["parameters"],
                "groups": len(groups),
                "rates": rates,
                "decays": decays,
                **{f"moments_{key}": value for key, value in moments.items()},
            }
        )
    return {"list": found}


def _unheld(sections: Mapping[str, Section]) -> Json:
    unheld = sections["optimizers"]["unheld"]
    if not unheld.get("parameters"):
        return {}
    return {"unheld_parameters": unheld["parameters"], "unheld_names": unheld["names"]}


def _schedule(sections: Mapping[str, Section]) -> Json:
    """Each schedule: how often it moves an update; without one, whether rates move."""
    moves = [
        {"class": one["class"], "per_update": sorted({*one["each"]}), "at": one["at"]}
        for one in sections["schedule"]["moves"]
        if one["each"]
    ]
    return {"schedules": moves or None, "none": None if moves else True}


def _clipping(sections: Mapping[str, Section]) -> Json:
    calls = sections["clipping"]["each"]
    if not calls:
        return {"clips": "no"}
    return {"clips": "yes", "largest": calls[0]["largest"], "norm": calls[0]["norm"]}


def _batch(sections: Mapping[str, Section]) -> Json:
    batch = sections["batch"]
    share = batch["padding"] / batch["tokens"] if batch.get("padding") else None
    return {
        "padding_share": share,
        "step_tokens": batch["tokens"] * batch["micro_batches"],
    }


def _several(sections: Mapping[str, Section]) -> Json:
    return {"several": sections["batch"]["micro_batches"] > 1}


def _start(sections: Mapping[str, Section]) -> Json:
    """Whether the norms are as no training leaves them: then nothing was loaded."""
    norms = sections["start"]["norms"]
    if not norms.get("began") or not norms["count"]:
        return {}
    untouched = norms["untouched"]
    whole = "initialised" if untouched == norms["count"] else "loaded"
    return {"began_as": whole if untouched in (0, norms["count"]) else "partly"}


def _tie(sections: Mapping[str, Section]) -> Json:
    """The tie that the configuration promises, where it can be told."""
    tie = sections["start"]["tie"]
    known = tie["promised"] and "shared" in tie
    return {"tied_as_promised": {"shared": tie["shared"]}} if known else {}


def _experts(sections: Mapping[str, Section]) -> Json:
    found = []
    for site, one in sections["experts"]["routers"].items():
        tokens = one["tokens"]
        mean = sum(tokens) / len(tokens)
        found.append(
            {
                "site": site,
                "count": len(tokens),
                "idle": sum(not n for n in tokens),
                "most": max(tokens) / mean if mean else None,
                "bias": bool(one.get("balanced_by_bias")),
            }
        )
    return {"list": found}


Statement = Callable[[Mapping[str, Section]], Json]
STATEMENTS: Mapping[str, tuple[Statement, ...]] = {
    "model": (_model, _modes),
    "weights": (_ties,),
    "loss": (_loss, _shift, _ends, _weights_of_passes, _auxiliary),
    "forward": (_attending,),
    "optimizers": (_optimizers, _unheld),
    "schedule": (_schedule,),
    "clipping": (_clipping,),
    "batch": (_several, _batch),
    "start": (_start, _tie),
    "experts": (_experts,),
}
"""Section → what is stated of it besides its facts."""
