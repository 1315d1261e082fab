"""The fused kernel and the torch path beside the truth, on every kind of call.

``python -m benchmarks.kernel_agreement [--parts N] [--minutes M] [--results FILE]``:
intervals of θ that miss the truth, and how often ``lower`` is off that of the CPU's
kernel by more than 1e-6, in triton's interpreter or on a GPU. It goes on where the last
call ended, for about M CPU minutes; after N parts it prints a table. Queries and keys
lie on a grid on which float32 computes scores exactly, so that the truth is that of the
scores which the kernel sees; the rows of MiniLM are those of a trained model.
``--torch`` reads as many parts by the torch path alone and replaces its counts: for a
change of that path, which the kernel does not share.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fragility_subjects import minilm
from benchmarks.kernel_compiled import find_triton
from benchmarks.table import RESULTS, publish

COUNTS = (
    *("rows", "missed", "off", "wide"),
    *("torch rows", "torch missed", "torch off", "torch wide"),
)
WIDTHS = (16, 32, 64, 80, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEYS = (3, 9, 17, 24, 40, 64, 65, 100, 160, 300)
SHARPNESS = (0.25, 0.5, 1.0, 2.0)
HEADS = ((2, 2), (4, 2), (4, 1))
QUERIES, SQUARE = 1024, 512
"""Queries of a call, and of one with as many keys: the interpreter likes many rows."""
LONG = (1024, 8192, 32768, 131072)
"""Keys of the longest rows, a few of each; part 0, 1, …"""
REAL = (8, 24, 64, 160)
"""Keys of the rows of a trained model, after those."""


def variants() -> Iterator[tuple[str, Any]]:
    """Yield kinds of calls without end, and another shape, dtype and scale each."""
    from tests.numerics.rows.kernel_cases import CASES, Case

    rng = torch.Generator().manual_seed(7)

    def one_of(options: tuple[Any, ...]) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=rng))]

    for K in LONG:
        yield f"{K} keys", Case(sizes=(8, K, 16), scale=one_of(SHARPNESS) / 4)
    for name, case in itertools.cycle(CASES.items()):
        (Q, K, _), width = case.sizes, one_of(WIDTHS)
        if "document" in (case.rows or {}):
            Q, K = (x * (SQUARE // Q) for x in (Q, K))
        elif Q == K:
            Q = K = SQUARE
        else:
            Q, K = QUERIES, K if case.mask else one_of(KEYS)
        scale = 2.0 ** -round(width.bit_length() / 2) * one_of(SHARPNESS)
        more = {"dtype": one_of(DTYPES), "heads": one_of(HEADS), "scale": scale}
        more |= {"chosen": case.chosen and QUERIES // 2}
        yield name, replace(case, sizes=(Q, K, width), **more)


def real_rows(keys: int) -> Tensor:
    """Return the scores of a trained encoder, (rows, keys)."""
    from tests.oracles.attention import written_down

    model, batch = minilm(long=True)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    cut = {name: x.repeat(1, 8)[:, :keys] for name, x in batch.items()}
    with torch.no_grad(), written_down(12) as scores:
        model(**cut)
    return torch.cat([z.reshape(-1, keys) for z in scores])


def of_real_rows(keys: int) -> Any:
    """Return the case of real rows: a score is its row's product with a unit."""
    from tests.numerics.rows.kernel_cases import Case

    z = real_rows(keys)[:2048]
    return Case(sizes=(len(z), keys, keys), scale=1.0, given=(z, torch.eye(keys)))


def case_of(number: int) -> tuple[str, Any, int]:
    """Return the name of a part's kind of call, its case and its seed."""
    if number < len(REAL):
        return f"MiniLM, {REAL[number]} keys", of_real_rows(REAL[number]), 0
    number -= len(REAL)
    return *next(itertools.islice(variants(), number, None)), number


def part(number: int, device: str) -> dict[str, Any]:
    """Return the counts of one part, under the name of its kind of call."""
    from tests.numerics.rows.kernel_cases import compared

    name, case, seed = case_of(number)
    return {"case": name, **compared(case, seed, device)}


def torch_again(given: argparse.Namespace) -> None:
    """Count the torch path's intervals anew; those of the kernel stay."""
    from tests.numerics.rows.kernel_cases import compared_torch

    record = json.loads(given.results.read_text())
    by_case = {row["case"]: row for row in record["rows"]}
    state = given.results.with_suffix(".torch.json")
    if not state.exists():
        state.write_text(json.dumps({"parts": 0, "counts": {}}))
    known = json.loads(state.read_text())
    until = time.process_time() + 60 * given.minutes
    while known["parts"] < record["parts"] and time.process_time() < until:
        name, case, seed = case_of(known["parts"])
        old = known["counts"].setdefault(name, {})
        for key, count in compared_torch(case, seed).items():
            old[key] = old.get(key, 0) + count
        known["parts"] += 1
        state.write_text(json.dumps(known))
    if known["parts"] < record["parts"]:
        return
    for name, found in known["counts"].items():
        by_case[name].update(found)
    rows = [row for name, row in by_case.items() if name != "all"]
    total = {key: sum(row[key] for row in rows) for key in COUNTS}
    rows.append({"case": "all", **total})
    publish("kernel_agreement", rows, parts=record["parts"], device=record["device"])
    state.unlink()


def added(rows: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows with another part's counts in its kind's row."""
    old = next((row for row in rows if row["case"] == new["case"]), None)
    if old is None:
        return [*rows, {key: new[key] for key in ("case", *COUNTS, "error")}]
    for key in COUNTS:
        old[key] += new[key]
    old["error"] = max(old["error"], new["error"])
    return rows


def _given(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kernel_agreement")
    parser.add_argument("--parts", type=int, default=68)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "kernel_agreement.json"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] = ()) -> None:
    given = _given(list(arguments))
    if given.torch:
        torch_again(given)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    find_triton()
    # Here: the cases import the kernel, and with it triton.
    from tests.numerics.rows.kernel_cases import enter

    enter(device)
    record = {"rows": [], "parts": 0}
    if given.results.exists():
        record = json.loads(given.results.read_text())
    rows = [row for row in record["rows"] if row["case"] != "all"]
    done, until = record["parts"], time.process_time() + 60 * given.minutes
    while done < given.parts and time.process_time() < until:
        rows, done = added(rows, part(done, device)), done + 1
        total = {key: sum(row[key] for row in rows) for key in COUNTS}
        record = {"rows": [*rows, {"case": "all", **total}], "parts": done}
        given.results.write_text(json.dumps(record, default=float) + "\n")
    if done == given.parts:
        publish("kernel_agreement", record["rows"], parts=done, device=device)


if __name__ == "__main__":
    main(sys.argv[1:])
