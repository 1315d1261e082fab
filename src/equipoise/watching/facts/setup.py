"""The set-up of a run: command, code, machine, versions, options, configuration.

Read once, when watching begins, so that runs can be compared. It draws no random number
and writes nothing; secrets are masked before anything is kept.
"""

import dataclasses
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import equipoise
from equipoise.probes.protocols import Emit, WithAnatomy
from equipoise.watching.facts.secrets import masked, masked_command

Json = dict[str, Any]
PACKAGES = (
    *("torch", "numpy", "transformers", "accelerate", "peft", "trl", "datasets"),
    *("lightning", "pytorch_lightning", "deepspeed", "triton", "flash_attn"),
)
"""Whose versions are kept, where the process has imported them."""
NOT_SEEDED = (67280421310721, 5489)
"""What ``torch.initial_seed()`` is where a generator starts with a constant."""
DRAWN = 2**48
"""A larger seed was drawn by torch, not written by a person."""
MOST_OPTIONS = 300
"""Values of one configuration that are kept: more is not a configuration."""
GIT_S = 2.0
STATED = 3
"""Samples that state the set-up: the first may be before any optimiser has stepped."""


@dataclass(kw_only=True)
class SetupFacts(WithAnatomy):
    """States the set-up in the first samples: one of them may not arrive."""

    name: str = "setup"
    samples: int = 0
    _optimizers: list[Optimizer] = field(default_factory=list)
    _found: Json = field(default_factory=dict)

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None:
        if self.samples < STATED and optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def facts(self) -> Json:
        if self.samples >= STATED or self._anatomy is None:
            return {}
        self.samples += 1
        found = self._found or read_setup(self._anatomy.model)
        self._found = {**found, "optimizers": list(map(_optimizer, self._optimizers))}
        if self.samples == STATED:
            self._optimizers = []
        return self._found


def read_setup(model: nn.Module) -> Json:
    """Return command, code, machine, versions, options; what is unknown is absent."""
    found: Json = {
        "command": " ".join(masked_command(_command())),
        "git": _git(_home()) if os.environ.get("RANK", "0") == "0" else None,
        "host": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "devices": _devices(model),
        "ranks": _ranks(),
        "threads": torch.get_num_threads(),
        "versions": _versions(),
        "seed": _seed(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "configuration": _configuration(model),
    }
    return {n: value for n, value in found.items() if value not in (None, {}, [])}


def _command() -> list[str]:
    """Return the command line; of a notebook's kernel, only its program."""
    if "ipykernel" in sys.modules:
        return ["notebook"]
    return [Path(sys.argv[0]).name or "python", *sys.argv[1:]]


def _home() -> Path:
    """Return the folder of the script that runs, or the working directory."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).resolve().parent if script else Path.cwd()


def _git(folder: Path) -> Json | None:
    """Return revision, branch and whether tracked files differ from the commit."""
    command = ("status", "--porcelain=v2", "--branch", "--untracked-files=no")
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        text = subprocess.run(
            ("git", *command),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_S,
            check=True,
        ).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    lines = text.splitlines()
    heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    changed = sum(not line.startswith("#") for line in lines)
    return {
        "revision": heads.get("branch.oid", ""),
        "branch": heads.get("branch.head", ""),
        "dirty": changed > 0,
        "changed_files": changed,
    }


def _devices(model: nn.Module) -> Json:
    """Return each device that holds weights, and how many tensors it holds."""
    counts = Counter(str(parameter.device) for parameter in model.parameters())
    names = {device: _device_name(device) for device in counts}
    return {device: {"tensors": n, **names[device]} for device, n in counts.items()}


def _device_name(device: str) -> Json:
    if not device.startswith("cuda"):
        return {}
    return {"name": torch.cuda.get_device_name(torch.device(device))}


def _ranks() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


def _versions() -> Json:
    loaded = {name: sys.modules.get(name) for name in PACKAGES}
    versions = {n: getattr(m, "__version__", None) for n, m in loaded.items() if m}
    return {
        "python": platform.python_version(),
        "equipoise": equipoise.__version__,
        **{name: str(version) for name, version in versions.items() if version},
    }


def _seed() -> int | None:
    """Return the seed of torch's generator, if somebody set it; nothing is drawn."""
    seed = torch.initial_seed()
    return None if seed in NOT_SEEDED or seed >= DRAWN else seed


def _optimizer(optimizer: Optimizer) -> Json:
    """Return every option: one value where all groups agree, otherwise one a group."""
    groups = optimizer.param_groups
    names = dict.fromkeys(
        name for group in groups for name in group if name != "params"
    )
    options = {name: [_value(group.get(name)) for group in groups] for name in names}
    return {
        "class": type(optimizer).__name__,
        "groups": len(groups),
        "options": {
            name: masked(own[0] if all(o == own[0] for o in own) else own, name)
            for name, own in options.items()
        },
    }


def _configuration(model: nn.Module) -> Json | None:
    """Return the configuration that a model carries, as far as it is plain values."""
    config = getattr(getattr(model, "module", model), "config", None)
    given = _as_mapping(config)
    if given is None:
        return None
    plain = {str(name): _value(item) for name, item in given.items()}
    kept = {n: item for n, item in plain.items() if not n.startswith("_")}
    return dict(list(masked(kept).items())[:MOST_OPTIONS])


def _as_mapping(config: object) -> Mapping[str, Any] | None:
    if isinstance(config, Mapping):
        return config
    # Hugging Face: what was chosen. Its dataclasses refuse some of their own fields.
    to_dict = getattr(config, "to_diff_dict", None)
    if callable(to_dict):
        found = to_dict()
        return found if isinstance(found, Mapping) else None
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return getattr(config, "__dict__", None)


def _value(value: object) -> Any:
    """Return a value as JSON; an object that is none by its class or name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.is_cpu else "a tensor"
    if isinstance(value, Mapping):
        return {str(name): _value(item) for name, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [_value(item) for item in value]
    return str(value) if isinstance(value, torch.dtype | Path) else _name(value)


def _name(value: object) -> str:
    named = getattr(value, "__name__", None) or type(value).__name__
    return str(named)
