"""A run's readings as tables: long (one value a row) or wide (one step a row).

The columns are made with NumPy; pandas, Polars and pyarrow are imported when asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import InputError, MissingExtraError
from equipoise.judging.verdict import Verdict
from equipoise.records import Finding, Reading, RunInfo, html_table
from equipoise.store.lock import State
from equipoise.store.packing import Array

Integers = NDArray[np.int64]
Form = Literal["long", "wide"]
Quantities = str | Sequence[str] | None
"""Names or patterns such as ``attention.theta.*``; None is every quantity."""


class Readable(Protocol):
    """What a table is made from: a run."""

    @property
    def quantities(self) -> list[str]: ...

    def series(self, quantity: str) -> Mapping[str, tuple[Integers, Array]]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LongTable:
    """One value a row, ordered by quantity, site, step and head."""

    step: Integers
    quantity: str
    sites: tuple[str, ...]
    site: Integers
    """Index into ``sites``."""
    head: Integers
    """0 where a site has one value."""
    value: Array

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WideTable:
    """One step a row, one column per quantity, site and head."""

    step: Integers
    columns: dict[str, Array]
    """``QUANTITY/SITE/HEAD`` → values; NaN where nothing was recorded at a step."""
    recorded: dict[str, NDArray[np.bool_]]
    """Column → where it has a reading, which may itself be NaN."""


def chosen(run: Readable, quantities: Quantities) -> list[str]:
    """Return the quantities that some names and patterns select.

    Raises:
        InputError: If one of them selects nothing.
    """
    known = run.quantities
    if quantities is None:
        return known
    patterns = [quantities] if isinstance(quantities, str) else list(quantities)
    found: list[str] = []
    for pattern in patterns:
        fits = [name for name in known if fnmatchcase(name, pattern)]
        if not fits:
            has = ", ".join(known) or "none yet"
            raise InputError(f"no quantity matches {pattern!r} (the run has: {has})")
        found += [name for name in fits if name not in found]
    return found


def long_tables(run: Readable, quantities: Quantities = None) -> Iterator[LongTable]:
    """Yield one table per quantity, so that only one is in memory."""
    for quantity in chosen(run, quantities):
        series = run.series(quantity)
        parts = [_rows(i, *series[site]) for i, site in enumerate(series)]
        step, site, head, value = (np.concatenate(p) for p in zip(*parts, strict=True))
        yield LongTable(
            step=step,
            quantity=quantity,
            sites=tuple(series),
            site=site,
            head=head,
            value=value,
        )


def _rows(
    site: int, steps: Integers, values: Array
) -> tuple[Integers, Integers, Integers, Array]:
    x_SH = values.reshape(len(steps), -1)
    heads = x_SH.shape[1]
    return (
        np.repeat(steps, heads),
        np.full(x_SH.size, site, np.int64),
        np.tile(np.arange(heads), len(steps)),
        x_SH.ravel(),
    )


def wide_table(run: Readable, quantities: Quantities = None) -> WideTable:
    """Return the steps at which any of the quantities was recorded, and the columns."""
    found = dict(_columns(run, quantities))
    every = [steps for steps, _ in found.values()]
    rows = np.unique(np.concatenate(every)) if every else np.empty(0, np.int64)
    columns, recorded = {}, {}
    for name, (steps, values) in found.items():
        at = np.searchsorted(rows, steps)
        columns[name] = np.full(len(rows), np.nan)
        columns[name][at] = values
        recorded[name] = np.zeros(len(rows), bool)
        recorded[name][at] = True
    return WideTable(step=rows, columns=columns, recorded=recorded)


def _columns(
    run: Readable, quantities: Quantities
) -> Iterator[tuple[str, tuple[Integers, Array]]]:
    for quantity in chosen(run, quantities):
        for site, (steps, values) in run.series(quantity).items():
            name = f"{quantity}/{site}" if site else quantity
            if values.ndim == 1:
                yield name, (steps, values)
            else:
                for head in range(values.shape[1]):
                    yield f"{name}/{head}", (steps, values[:, head])


def library(name: str) -> Any:
    """Return a library of tables, or say how to get it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        absent = (missing.name or "").split(".")[0]
        if absent != name.split(".")[0]:
            raise
        raise MissingExtraError(
            f"this table needs {absent}, which is not installed: "
            'pip install "equipoise[export]"'
        ) from missing


def _wide(run: Readable, quantities: Quantities, form: str) -> WideTable | None:
    """Return the wide form where it is asked for."""
    if form not in ("long", "wide"):
        raise InputError(f"form={form!r}: choose long or wide")
    return wide_table(run, quantities) if form == "wide" else None


def to_pandas(
    run: Readable, quantities: Quantities = None, *, form: Form = "long"
) -> Any:
    """Return the readings as a ``pandas.DataFrame``.

    Args:
        run: The run.
        quantities: Names or patterns such as ``attention.theta.*``; all by default.
        form: ``long`` has the columns step, quantity, site, head and value; ``wide``
            one row per step and one column per quantity, site and head.

    Raises:
        MissingExtraError: If pandas is not installed.
    """
    pd = library("pandas")
    if (wide := _wide(run, quantities, form)) is not None:
        return pd.DataFrame(wide.columns, index=pd.Index(wide.step, name="step"))
    columns = _long_columns(run, quantities, pd.Categorical.from_codes)
    return pd.DataFrame(columns)


def to_polars(
    run: Readable, quantities: Quantities = None, *, form: Form = "long"
) -> Any:
    """Return a ``polars.DataFrame``; in the wide form null is "not recorded"."""
    pl = library("polars")
    if (wide := _wide(run, quantities, form)) is not None:
        series = [
            pl.Series(name, values).zip_with(
                pl.Series(wide.recorded[name]),
                pl.Series([None], dtype=pl.Float64).new_from_index(0, len(values)),
            )
            for name, values in wide.columns.items()
        ]
        return pl.DataFrame([pl.Series("step", wide.step), *series])
    columns = _long_columns(
        run,
        quantities,
        lambda codes, names: pl.Series(names, dtype=pl.Categorical)[codes],
    )
    return pl.DataFrame(columns)


def to_arrow(
    run: Readable, quantities: Quantities = None, *, form: Form = "long"
) -> Any:
    """Return a ``pyarrow.Table``; in the wide form null is "not recorded"."""
    pa, wide = library("pyarrow"), _wide(run, quantities, form)
    if wide is None:
        parts = [arrow_part(part) for part in long_tables(run, quantities)]
        return pa.concat_tables(parts).unify_dictionaries() if parts else arrow_empty()
    columns = {
        name: pa.array(values, mask=~wide.recorded[name])
        for name, values in wide.columns.items()
    }
    return pa.table({"step": wide.step, **columns})


def arrow_schema() -> Any:
    """Return the columns of the long form, as Arrow and Parquet name them."""
    pa = library("pyarrow")
    text = pa.dictionary(pa.int32(), pa.string())
    names = (("step", pa.int64()), ("quantity", text), ("site", text))
    return pa.schema([*names, ("head", pa.int64()), ("value", pa.float64())])


def arrow_part(part: LongTable) -> Any:
    """Return one quantity as an Arrow table."""
    pa = library("pyarrow")
    codes = np.zeros(len(part), np.int32)
    arrays = [
        pa.array(part.step),
        pa.DictionaryArray.from_arrays(codes, pa.array([part.quantity])),
        pa.DictionaryArray.from_arrays(
            part.site.astype(np.int32), pa.array(list(part.sites), pa.string())
        ),
        pa.array(part.head),
        pa.array(part.value, pa.float64()),
    ]
    return pa.Table.from_arrays(arrays, schema=arrow_schema())


def arrow_empty() -> Any:
    """Return the long form of a run without readings."""
    return arrow_schema().empty_table()


Coded = Callable[[Integers, list[str]], Any]
"""Makes a column of names from the index of each row's name, and the names."""


def _long_columns(
    run: Readable, quantities: Quantities, coded: Coded
) -> dict[str, Any]:
    """Return the columns of the long form over all quantities, by name."""
    parts = list(long_tables(run, quantities))
    sites = list(dict.fromkeys(site for part in parts for site in part.sites))
    position = {site: i for i, site in enumerate(sites)}
    own = [np.array([position[s] for s in part.sites], np.int64) for part in parts]
    nothing = np.empty(0, np.int64)
    quantity = [np.full(len(part), i, np.int64) for i, part in enumerate(parts)]
    site = [table[part.site] for table, part in zip(own, parts, strict=True)]
    names = [part.quantity for part in parts]
    return {
        "step": np.concatenate([nothing, *(part.step for part in parts)]),
        "quantity": coded(np.concatenate([nothing, *quantity]), names),
        "site": coded(np.concatenate([nothing, *site]), sites),
        "head": np.concatenate([nothing, *(part.head for part in parts)]),
        "value": np.concatenate([np.empty(0), *(part.value for part in parts)]),
    }


class Shown(Readable, Protocol):
    """What a run shows of itself."""

    path: Path
    info: RunInfo

    @property
    def state(self) -> State: ...

    @property
    def steps(self) -> Integers: ...

    @property
    def verdict(self) -> Verdict: ...

    @property
    def findings(self) -> list[Finding]: ...

    def ends(self, quantity: str) -> tuple[Reading, Reading]: ...


def run_html(run: Shown) -> str:
    """Return a run as a table for notebooks: what it is, and its verdict."""
    steps, verdict = run.steps, run.verdict
    rows = [
        ("state", run.state),
        ("steps", f"{steps[0]} to {steps[-1]}" if len(steps) else "none yet"),
        ("verdict", f"{verdict.state}: {verdict.headline}"),
        ("try", verdict.advice),
        ("loss", _loss(run)),
        ("findings", str(len(run.findings))),
        ("quantities", ", ".join(run.quantities)),
        ("file", str(run.path)),
    ]
    return html_table(run.info.name, [(name, cell) for name, cell in rows if cell])


def _loss(run: Shown) -> str:
    if "loss" not in run.quantities:
        return ""
    first, last = (reading.values[0][0] for reading in run.ends("loss"))
    return f"{first:.4g} → {last:.4g}"
