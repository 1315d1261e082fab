"""Numbers as people read them."""

import math

ABSENT = "not recorded"


def short(value: float | None) -> str:
    """Return a number for people: four digits, and NaN as ``NaN``.

    >>> short(0.000123456), short(3.0), short(math.nan), short(None)
    ('1.235e-04', '3', 'NaN', 'not recorded')
    """
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'−' if value < 0 else ''}Inf"
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4g}"
