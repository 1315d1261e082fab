"""What an experiment's numbers say in one sentence, failed patterns included."""

from collections.abc import Callable, Sequence

from equipoise.lab.results import Row

Conclusion = Callable[[Sequence[Row]], str]


def prepost(rows: Sequence[Row]) -> str:
    """Say whether Emadi's pattern holds: post-LN starves its early layers."""
    by_arm = {row.arm: row for row in rows}
    if not {"pre", "post"} <= by_arm.keys():
        return "pre and post are not both finished yet."
    pre, post = by_arm["pre"], by_arm["post"]
    return " ".join([_starved(post), _carried(pre), _apart(pre, post)])


def _mean(row: Row, measure: str) -> float | None:
    found = row.values.get(measure)
    return found.mean if found else None


def _starved(post: Row) -> str:
    least = _mean(post, "gradient_least_to_last")
    if least is None:
        return "Gradients over depth were not recorded."
    said = f"post-LN's weakest layer gets {least:.1e} of the last layer's gradient"
    return f"{said}: its early layers do not learn." if least < 1e-3 else f"{said}."


def _carried(pre: Row) -> str:
    spread = _mean(pre, "gradient_spread")
    if spread is None:
        return ""
    return f"pre-LN's layers 2…N stay within a factor of {spread:.2g}."


def _apart(pre: Row, post: Row) -> str:
    a, b = _mean(pre, "validation"), _mean(post, "validation")
    if a is None or b is None:
        return ""
    better, worse = ("pre", "post") if a < b else ("post", "pre")
    return f"{better}-LN ends {abs(a - b):.2f} nats per token below {worse}-LN."


CONCLUSIONS: dict[str, Conclusion] = {"prepost": prepost}


def conclusion(name: str, rows: Sequence[Row]) -> str:
    """Return the experiment's finding; without one of its own, its paired table."""
    own = CONCLUSIONS.get(name.removesuffix("-quick"))
    if own is not None:
        return own(rows)
    pairs = [f"{row.arm}: {row.against_first}" for row in rows if row.against_first]
    return "; ".join(pairs) or "nothing to compare yet."
