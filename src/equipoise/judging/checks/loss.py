"""Checks of the loss and its targets.

Counts are exact. Weights of micro-batches are compared within the rounding of the
format in which the backward pass carried them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from equipoise.judging.checks.registry import Violation, finds, violated
from equipoise.judging.facts import Facts, Section

Call = Mapping[str, Any]
NEXT = 1
LEAST_TARGETS = 16
"""Targets that must all agree before a shift is known."""
LEAST_CHANGES = 8
"""Targets among them that differ from the one before: a constant meets everywhere."""
LEAST_ENDS = 8
"""Documents that must have ended before an end token is missed."""
MOST_PASSES = 16
"""Micro-batches whose losses are all stated."""
ROUNDINGS = 8
"""Roundings that a weight may have been through, for each micro-batch."""
SUMMED = 16
"""Roundings of a loss: of its mean, which is summed in parts, and of what is added."""


def _loss(facts: Sequence[Facts]) -> Section:
    return facts[-1].section("loss")


def _calls(section: Section) -> list[Call]:
    return list(section.get("calls", ()))


@finds("check.labels_shift")
def labels_shift(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """The next token is the target, once; exact, where the places are known."""
    section = _loss(facts)
    shifts = {s: n for call in _calls(section) for s, n in _meet(call)}
    if NEXT in shifts:
        return []
    known = section.get("aligned") and section.get("causal")
    if len(shifts) != 1 or section.get("unseen") or not known:
        return None
    ((shift, count),) = shifts.items()
    case = "twice" if shift > NEXT else "not" if shift == 0 else "back"
    return [violated(case=case, shift=shift, targets=count)]


def _meet(call: Call) -> Iterator[tuple[int, int]]:
    """Yield the shift at which every counted target is an id, if there is just one."""
    for table in call.get("meets", ()):
        columns = zip(table["shifts"], table["compared"], table["equal"], strict=True)
        whole = [(int(s), int(n)) for s, n, same in columns if n and n == same]
        if len(whole) == 1 and whole[0][1] >= LEAST_TARGETS:
            if call.get("changes", 0) >= LEAST_CHANGES:
                yield whole[0]


@finds("check.targets_ignored")
def targets_ignored(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Some target counts, in one of two sampled steps that follow each other."""
    counts = [_counted(one.section("loss")) for one in [*facts][-2:]]
    if counts[-1] is None:
        return None
    if counts[-1][1]:
        return []
    if len(counts) < 2 or counts[0] is None or counts[0][1]:
        return None
    return [violated(targets=counts[-1][0])]


def _counted(section: Section) -> tuple[int, int] | None:
    """Return targets and those that count, where all of the loss is made of them."""
    calls = _calls(section)
    if not calls or section.get("unseen") or any("counted" not in c for c in calls):
        return None
    return (
        sum(int(c["targets"]) for c in calls),
        sum(int(c["counted"]) for c in calls),
    )


@finds("check.eos_ignored")
def eos_ignored(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Among the ends of documents in the last samples, one was a target."""
    found = [
        c["ends"] for one in facts for c in _calls(one.section("loss")) if "ends" in c
    ]
    documents = sum(int(ends["documents"]) for ends in found)
    if any(ends["targets"] for ends in found):
        return []
    if documents < LEAST_ENDS:
        return None
    return [violated(documents=documents)]


@finds("check.loss_of_probabilities")
def loss_of_probabilities(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """A loss function is given the kind of numbers it takes, by the operation that
    made them."""
    calls = [call for call in _calls(_loss(facts)) if call.get("given") != "unknown"]
    if not calls:
        return None
    return [found for call in calls[:1] for found in _wrong_kind(call)]


def _wrong_kind(call: Call) -> Iterator[Violation]:
    function, given = str(call["function"]), str(call["given"])
    wrong = {
        "cross_entropy": ("probabilities",),
        "log_softmax picked by target": ("probabilities",),
        "nll_loss": ("probabilities", "logits"),
        "binary_cross_entropy_with_logits": ("probabilities", "sigmoid"),
    }
    if given in wrong.get(function, ()):
        case = f"nll_of_{given}" if function == "nll_loss" else "twice"
        yield violated(case=case, function=function, given=given)


@finds("check.rows_mixed")
def rows_mixed(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Each row's targets are its own next ids, and not exactly another row's."""
    section = _loss(facts)
    for call in _calls(section):
        if (count := _other_order(call, section)) and not list(_meet(call)):
            return [violated(case="order", targets=count)]
        rows = call.get("rows")
        if not rows or rows["rows"] < 2:
            continue
        if rows["own"] == rows["rows"]:
            return []
        others = rows["others"] >= 2 and rows["own"] + rows["others"] == rows["rows"]
        if others and section.get("aligned"):
            return [violated(rows=int(rows["others"]), of=int(rows["rows"]))]
    return None


def _other_order(call: Call, section: Section) -> int:
    """Return the targets, if all are the next ids once rows are flattened otherwise."""
    crossed = call.get("crossed")
    if not crossed or (crossed["square"] and not section.get("aligned")):
        return 0
    for way in crossed["ways"]:
        columns = zip(way["shifts"], way["compared"], way["equal"], strict=True)
        met = {int(s): (int(n), int(same)) for s, n, same in columns}
        count, same = met[NEXT]
        if LEAST_TARGETS <= count == same and way["changes"] >= LEAST_CHANGES:
            return count
    return 0


@finds("check.microbatch_weights")
def microbatch_weights(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """The weights of k micro-batches do not add up to k, or to 1/k.

    Any other sum is a factor that the loop chose. Two of four losses that are added to
    one gradient are not micro-batches of it: the same targets, or another function.
    """
    section = _loss(facts)
    calls, k = _calls(section), int(section.get("passes", 0))
    if k < 2:
        return []
    if not _are_microbatches(section, calls, k):
        return None
    total = math.fsum(float(call["weight"]) for call in calls)
    within = ROUNDINGS * k * max(float(call["epsilon"]) for call in calls)
    for case, sum_ in (("sum", float(k)), ("twice", 1 / k)):
        if abs(total - sum_) <= within * sum_:
            return [violated(case=case, passes=k, total=total)]
    return []


def _are_microbatches(section: Section, calls: Sequence[Call], k: int) -> bool:
    one_each = [call["pass"] for call in calls] == list(range(k)) and k <= MOST_PASSES
    if not one_each or section.get("unseen") or not section.get("adds_up"):
        return False
    if any("weight" not in call or not call.get("counted") for call in calls):
        return False
    alike = {(call["function"], call["classes"]) for call in calls}
    return len(alike) == 1 and len({tuple(call["hash"]) for call in calls}) == k


@finds("check.auxiliary_detached")
def auxiliary_detached(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """What the model keeps as an auxiliary loss is part of the loss that is
    differentiated, and not only its value."""
    kept = _loss(facts).get("auxiliary")
    if not kept:
        return None
    missing = [name for name, one in kept.items() if not one["part"]]
    if not missing:
        return []
    if (only := _only_its_value([*facts][-2:])) is not None:
        return [violated(only, case="value", count=len(missing))]
    named = [name for name in missing if kept[name]["named"]]
    bare = [name for name in missing if kept[name].get("bare")]
    if named and len(missing) == len(kept) - len(bare):
        return [violated(named[0], case="unused", count=len(named))]
    return None


def _only_its_value(facts: Sequence[Facts]) -> str | None:
    """Return what is left out of the graph, and whose number is added to the loss.

    What is added follows it from one step to the next. A constant follows nothing.
    """
    terms = [_terms(one.section("loss")) for one in facts]
    if len(terms) < 2 or terms[0] is None or terms[1] is None:
        return None
    (first, kept_1, rounding_1), (last, kept_2, rounding_2) = terms[0], terms[1]
    rounding = rounding_1 + rounding_2
    if abs(last - first) <= 4 * rounding:
        return None
    for name in kept_1.keys() & kept_2.keys():
        a, b = kept_1[name], kept_2[name]
        if a and b and abs(first * b - last * a) <= rounding * (abs(a) + abs(b)):
            return name.removeprefix(ALL)
    return None


ALL = "*"
"""Before the first name of several whose sum is looked at."""


def _terms(section: Section) -> tuple[float, dict[str, float], float] | None:
    """Return the term beside the mean, the scalars left out, and the rounding."""
    added, kept = section.get("added"), section.get("auxiliary", {})
    missing = {n: float(one["value"]) for n, one in kept.items() if not one["part"]}
    if added is None or not section.get("constant") or not missing:
        return None
    graded = {n: x for n, x in missing.items() if not kept[n].get("bare")}
    if len(graded) > 1:
        missing[f"{ALL}{next(iter(graded))}"] = math.fsum(graded.values())
    rounding = SUMMED * float(section["epsilon"]) * abs(float(section["loss"]))
    return float(added), missing, rounding
