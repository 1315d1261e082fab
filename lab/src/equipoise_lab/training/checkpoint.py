"""Checkpoints without pickle: whole or not there, and exact.

A checkpoint is a folder ``step-00000100``: ``model.safetensors``,
``optimizer.safetensors``, ``state.json`` and one ``rank-N.json`` per process with its
random state and its place in the data. It is written beside and renamed, so a folder
of that name is complete whatever was killed.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from equipoise.errors import InputError
from equipoise_lab.data.batches import share
from equipoise_lab.training.distributed import barrier

KEEP = 2


def save(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int,
    state: Mapping[str, Any],
    mine: Mapping[str, Any],
) -> Path:
    """Write a checkpoint; every process calls it, ``mine`` is this process's own."""
    weights = full_weights(model)
    moments: Any = _dcp().get_optimizer_state_dict(model, optimizer, options=_full())
    target, draft = _name(folder, step), folder / f".draft-{step:08d}"
    rank = share().rank
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file(weights, draft / "model.safetensors")
        save_file(_flat(moments["state"]), draft / "optimizer.safetensors")
        _write(draft / "state.json", {"step": step, **state})
    barrier()
    _write(draft / f"rank-{rank}.json", {**mine, "random": _random_state()})
    barrier()
    if rank == 0:
        _publish(draft, target)
        for old in finished(folder)[:-KEEP]:
            shutil.rmtree(old)
    barrier()
    return target


def load(
    path: Path, model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put a checkpoint back, random state included; return (state, mine)."""
    weights = load_file(path / "model.safetensors")
    _check_shapes(path, weights, model)
    # The optimiser first: putting its state in place takes a step of size zero.
    dcp = _dcp()
    groups = dcp.get_optimizer_state_dict(model, optimizer)["param_groups"]
    moments = _nested(load_file(path / "optimizer.safetensors"))
    whole = dcp.StateDictOptions(full_state_dict=True)
    both: dict[str, Any] = {"state": moments, "param_groups": groups}
    dcp.set_optimizer_state_dict(model, optimizer, both, options=whole)
    dcp.set_model_state_dict(model, weights, options=whole)
    mine = _own(path)
    _restore_random(mine["random"])
    return json.loads((path / "state.json").read_text()), mine


def finished(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step-????????"))


def _name(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _own(path: Path) -> dict[str, Any]:
    at = share()
    written = len(list(path.glob("rank-*.json")))
    if written != at.world:
        raise InputError(
            f"{path} was written by {written} processes and {at.world} want to resume "
            "it; start as many"
        )
    loaded: dict[str, Any] = json.loads((path / f"rank-{at.rank}.json").read_text())
    return loaded


def _publish(draft: Path, target: Path) -> None:
    for file in draft.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if target.exists():  # a run resumed from an earlier step comes by again
        shutil.rmtree(target)
    draft.rename(target)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _plain(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _flat(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return name/key → tensor: parameter names hold dots, never slashes."""
    return {
        f"{name}/{key}": torch.as_tensor(value).contiguous()
        for name, moments in state.items()
        for key, value in moments.items()
    }


def _nested(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    nested: dict[str, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        name, key = path.split("/")
        nested.setdefault(name, {})[key] = tensor
    return nested


def _check_shapes(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    here: dict[str, Any] = _dcp().get_model_state_dict(model)
    wanted = {name: tuple(tensor.shape) for name, tensor in here.items()}
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(wanted.keys() | given.keys()):
        a, b = given.get(name, "nothing"), wanted.get(name, "nothing")
        if a != b:
            raise InputError(
                f"{path} is a checkpoint of another model: {name} is {a} there and "
                f"{b} here"
            )


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def _restore_random(state: Mapping[str, str]) -> None:
    torch.set_rng_state(_bytes(state["cpu"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every weight under its plain name; on other ranks of a group, nothing."""
    return _plain(_dcp().get_model_state_dict(model, options=_full()))


def _dcp() -> Any:
    """Return torch's view of a state that may be sharded; two seconds to import."""
    from torch.distributed.checkpoint import state_dict

    return state_dict


def _full() -> Any:
    return _dcp().StateDictOptions(full_state_dict=True, cpu_offload=True)
