"""Faults of autopilot, board and audit: broken files and disks, replaced and hostile.

``python -m benchmarks.trust_faults [CASES [SEED]]``: CASES (501 unless given), a third
of each kind, drawn from a seed. A case passes if

- an audit of a damaged directory ends in a verdict or in one ``InputError``, and a
  damage that loading would notice is never called healthy;
- the board answers every request about runs that are cut, filled with noise, replaced
  or deleted meanwhile with a status of its own (never 500), names no path outside, and
  answers the rest as before;
- snapshots on a disk that fills up, vanishes or turns read-only raise nothing, leave no
  file behind, and what is kept is restored exactly as it was taken.
"""

import errno
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient
from torch import nn

from benchmarks.table import publish
from equipoise.auditing.audit import audit
from equipoise.autopilot.snapshots import Snapshots, restore
from equipoise.errors import InputError
from equipoise.records import Reading, RunInfo
from equipoise.store import RunWriter
from equipoise.web.app import application
from equipoise.web.security import Access

Case = Callable[[random.Random, Path], str]
"""What went wrong in a folder of its own; nothing if the case passed."""
SLOW_S = 20.0
"""CPU seconds after which a case counts as hanging."""
LAYERS, WIDTH = 3, 32


# An audit


def weights(rng: random.Random) -> dict[str, torch.Tensor]:
    """Return a Llama's tensors, in fp8 with scales every third time."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    maps = {f"self_attn.{letter}_proj": (WIDTH, WIDTH) for letter in "qkvo"}
    maps |= {"mlp.gate_proj": (64, WIDTH), "mlp.up_proj": (64, WIDTH)}
    maps |= {"mlp.down_proj": (WIDTH, 64)}
    found: dict[str, torch.Tensor] = {}
    packed = rng.random() < 1 / 3
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        for name, shape in maps.items():
            matrix = 0.05 * torch.randn(shape, generator=generator)
            key = f"{stem}.{name}.weight"
            found[key] = matrix.div(1e-3).to(torch.float8_e4m3fn) if packed else matrix
            if packed:
                found[f"{key}_scale"] = torch.tensor(1e-3)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{stem}.{norm}.weight"] = torch.ones(WIDTH)
    found["model.norm.weight"] = torch.ones(WIDTH)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = 0.05 * torch.randn(50, WIDTH, generator=generator)
    return found


CONFIG = {
    "model_type": "llama-of-our-own",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "vocab_size": 50,
}


def _cut(rng: random.Random, folder: Path) -> bool:
    file = folder / "model.safetensors"
    os.truncate(file, rng.randrange(file.stat().st_size))
    return True


def _flipped(rng: random.Random, folder: Path) -> bool:
    """Flip bits of the header."""
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(rng.randint(1, 5)):
        raw[rng.randrange(end)] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)
    return False  # a name with another letter may be another model's


def _without_layer(rng: random.Random, folder: Path) -> bool:
    tensors = load_file(folder / "model.safetensors")
    gone = f".layers.{rng.randrange(LAYERS)}."
    save_file(
        {name: x for name, x in tensors.items() if gone not in name},
        folder / "model.safetensors",
    )
    return True


def _bad_number(rng: random.Random, folder: Path) -> bool:
    tensors = load_file(folder / "model.safetensors")
    name = rng.choice([n for n, x in tensors.items() if x.dtype == torch.float32])
    flat = tensors[name].reshape(-1)
    flat[rng.randrange(len(flat))] = rng.choice([float("nan"), float("inf")])
    save_file(tensors, folder / "model.safetensors")
    return True


def _strange_config(rng: random.Random, folder: Path) -> bool:
    values: list[Any] = [None, -1, 0, 10**30, "x" * 10_000, [], {}, [[]] * 9, True, 0.5]
    strange = {key: rng.choice(values) for key in rng.sample(list(CONFIG), 3)}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **strange}))
    return False


def _strange_text(rng: random.Random, folder: Path) -> bool:
    texts = ["", "[", "[" * 100_000, "\0", "{}" * 3, '{"a": NaN}', "null"]
    (folder / "config.json").write_text(rng.choice(texts))
    return False


def _odd_scales(rng: random.Random, folder: Path) -> bool:
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if "proj" in name and "scale" not in name:
            tensors[name] = tensors[name].float().to(torch.float8_e5m2)
            shape = rng.choice([(), (1,), (7,), (0,), (WIDTH, 1), (2, 2), (1, 1, 1)])
            tensors[f"{name}_scale"] = torch.full(shape, rng.choice([1.0, 1e30, -1.0]))
    save_file(tensors, folder / "model.safetensors")
    return False


def _odd_index(rng: random.Random, folder: Path) -> bool:
    shard = rng.choice(["../x.safetensors", "/etc/passwd", "", "none", "a\0b", "."])
    index = {"weight_map": {"w": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return True


DAMAGES = (
    *(_cut, _flipped, _without_layer, _bad_number, _strange_config, _strange_text),
    *(_odd_scales, _odd_index),
)


def an_audit(rng: random.Random, folder: Path) -> str:
    save_file(weights(rng), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    damage = rng.choice(DAMAGES)
    noticed = damage(rng, folder)
    try:
        state = audit(folder).verdict.state
    except InputError as error:
        return "" if str(error).strip() else "an error without words"
    return f"{damage.__name__}: {state}" if noticed and state == "healthy" else ""


# The board


def a_board(rng: random.Random, folder: Path) -> str:
    for name, loss in {"good": 1.0, "bad": 2.0, "new": 9.0}.items():
        _write_run(folder / f"{name}.eqp", loss)
    app = application(folder, Access())
    with TestClient(app, base_url="http://127.0.0.1") as client:
        first = client.get("/api/run/bad").json()
        _damage(rng, folder / "bad.eqp")
        for address in rng.sample(_addresses(first["cursor"]), 6):
            answer = client.get(address, headers={"cookie": rng.choice(COOKIES)})
            if answer.status_code not in {200, 400, 404}:
                return f"{address}: {answer.status_code}"
            if "root:" in answer.text:
                return f"{address}: a file outside"
        asked = {"quantity": "loss", "points": 10}
        if client.get("/api/grid/good", params=asked).status_code != 200:
            return "the other run is not served"
        now = client.get("/api/run/bad")
        if now.status_code == 200 and (folder / "bad.eqp").exists():
            return _half(client, now.json(), first)
    return ""


def _half(client: TestClient, now: dict[str, Any], before: dict[str, Any]) -> str:
    """Say whether one answer is of the old run, and another of the new one."""
    news = client.get("/api/since/bad", params={"cursor": 0, "quantity": "loss"})
    if news.status_code != 200 or news.json()["identity"] == now["identity"]:
        return ""
    return "half old, half new"


def _write_run(path: Path, loss: float) -> None:
    with RunWriter(path, RunInfo(name=path.stem, created="now", version="0")) as writer:
        writer.append([Reading.scalar(step, "loss", loss) for step in range(20)])


def _damage(rng: random.Random, path: Path) -> None:
    kind = rng.choice(["cut", "noise", "moved", "copied", "deleted", "folder", "more"])
    if kind == "cut":
        os.truncate(path, rng.randrange(path.stat().st_size))
    elif kind == "noise":
        raw = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 200)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        path.write_bytes(raw)
    elif kind in {"moved", "copied"}:
        put = shutil.move if kind == "moved" else shutil.copyfile
        put(path.with_name("new.eqp"), path)
    elif kind == "more":
        with RunWriter.resume(path) as writer:
            writer.append([Reading.scalar(step, "loss", 3.0) for step in range(20, 40)])
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()


COOKIES = ("", "a/b=1; foo[bar]=1", 'x="', "=;;=", "equipoise_token=1")


def _addresses(cursor: int) -> list[str]:
    parts = ("run", "verdict", "changes", "grid", "heads")
    names = [f"/api/{part}/bad?quantity=loss" for part in parts]
    names += [f"/api/since/bad?quantity=loss&cursor={n}" for n in (0, cursor, 10**20)]
    names += ["/api/runs", "/api/changed", "/api/changed?run=bad", "/run/bad", "/"]
    names += ["/api/compare?run=good&run=bad", "/api/run/..%2f..%2fetc%2fpasswd"]
    return [*names, f"/api/run/{'x' * 5000}", "/api/grid/bad?points=1e999&quantity=%00"]


# Snapshots of the autopilot


def a_snapshot(rng: random.Random, folder: Path) -> str:
    torch.manual_seed(rng.randrange(1 << 30))
    model = nn.Linear(rng.choice([1, 3, 64]), 8).to(
        rng.choice([torch.float32, torch.bfloat16, torch.float64])
    )
    kinds = (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop)
    optimizer = rng.choice(kinds)(model.parameters(), lr=0.1)
    memory = rng.choice([1e-9, 1.0])
    ring = Snapshots(every=rng.choice([1, 3]), memory=memory, folder=folder)
    truth: dict[int, list[torch.Tensor]] = {}
    breaks = rng.randrange(12)
    for step in range(12):
        with mock.patch("os.posix_fallocate", _breaking(rng, step >= breaks, folder)):
            if ring.due(step):
                truth[step] = [x.clone() for x in model.state_dict().values()]
                ring.take(step, model, optimizer)
        x = torch.randn(4, model.in_features, dtype=model.weight.dtype)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    if folder.is_dir() and list(folder.iterdir()):
        return "a file was left behind"
    for kept in ring.kept:
        restore(kept, model, optimizer)
        same = zip(model.state_dict().values(), truth[kept.step], strict=True)
        if not all(torch.equal(a, b) for a, b in same):
            return f"step {kept.step} is not what it was"
    return ""


def _breaking(rng: random.Random, broken: bool, folder: Path) -> Callable[..., None]:
    real = os.posix_fallocate
    code = rng.choice([errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
    gone = rng.random() < 0.2

    def fallocate(*given: int) -> None:
        if broken:
            if gone:
                folder.rename(folder.with_name("gone"))
                folder.with_name("gone").rename(folder)
            raise OSError(code, os.strerror(code))
        real(*given)

    return fallocate


KINDS: dict[str, Case] = {"audit": an_audit, "board": a_board, "autopilot": a_snapshot}


def tried(kind: str, seed: str) -> str:
    """Return the failure of one case; empty if it passed."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "case"
        place.mkdir()
        began = time.process_time()
        try:
            wrong = KINDS[kind](rng, place)
        # What the campaign looks for is any exception at all: it is reported by name.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong = f"{type(error).__name__}: {error}"
        slow = time.process_time() - began > SLOW_S
    return wrong or ("hangs" if slow else "")


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 501
    seed = sys.argv[2] if len(sys.argv) > 2 else "trust"
    torch.set_num_threads(1)
    rows = []
    for kind in KINDS:
        count = cases // len(KINDS)
        wrong = {n: tried(kind, f"{seed} {kind} {n}") for n in range(count)}
        failed = {n: text for n, text in wrong.items() if text}
        first = next((f"{n}: {text}" for n, text in failed.items()), "")
        rows.append(
            {"of": kind, "cases": count, "failed": len(failed), "first": first[:200]}
        )
        print(rows[-1], flush=True)
    publish("trust_faults", rows, seed=seed)


if __name__ == "__main__":
    main()
