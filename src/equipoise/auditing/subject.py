"""The model and the batch of an audit, from what the user typed.

Weights are opened without running code from a checkpoint. A batch may come in any form
that the model takes; the output is its logits, else its hidden states.
"""

import copy
import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.auditing import MODEL_FORMS
from equipoise.errors import InputError

Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


def output_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's main output: logits, else hidden states, else its first."""
    return _main(_called(model, batch))


def widened(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the model in another dtype, in eval mode."""
    return copy.deepcopy(model).to(dtype).eval()


def batch_as(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating-point tensors in another dtype."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: batch_as(item, dtype) for key, item in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(batch_as(item, dtype) for item in batch)
    return batch


def _called(model: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _main(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            found: Tensor = getattr(output, name)
            return found
    items = output.values() if isinstance(output, Mapping) else output
    if isinstance(items, tuple | list) or isinstance(output, Mapping):
        for item in items:
            if isinstance(item, Tensor) and item.is_floating_point() and item.dim():
                return item
    raise InputError(
        f"the model returned {type(output).__name__} without a floating-point tensor; "
        "wrap it so that it returns the tensor whose error matters"
    )


# What reading a pickle may raise, as its documentation warns.
UNPICKLING = (
    *(UnpicklingError, EOFError, AttributeError, ImportError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
SENTENCES = [
    "A model that trains in one precision may not serve in another.",
    "Where does the error come from, and how large will it be?",
]


def loaded(
    spec: str, *, tokens: int = 64, seed: int = 0
) -> tuple[nn.Module, Batch | None]:
    """Return the model a string names, and a batch when one can be made for it."""
    if Path(spec).is_dir():
        return _from_directory(Path(spec), tokens, seed)
    place, _, name = spec.rpartition(":")
    if not place:
        raise InputError(f"cannot find a model called {spec!r}; give {MODEL_FORMS}")
    made = _callable(place, name)()
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec} returned {type(model).__name__}, not a torch module")
    return model, batch


def loaded_batch(path: Path) -> Batch:
    """Return a batch from ``.pt`` (tensors only), ``.safetensors`` or ``.json``."""
    if not path.is_file():
        raise InputError(f"{path}: no such batch file")
    if path.suffix == ".json":
        return _from_json(path)
    if path.suffix in {".safetensors", ".pt", ".pth"}:
        return _from_tensors(path)
    raise InputError(f"{path}: a batch is a .pt, .safetensors or .json file")


def _from_tensors(path: Path) -> Batch:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        batch: Batch = torch.load(path, weights_only=True)
    except (SafetensorError, *UNPICKLING) as error:
        raise InputError(f"{path}: not a whole file of tensors") from error
    return batch


def _from_json(path: Path) -> dict[str, Tensor]:
    try:
        given = json.loads(path.read_text())
        return {key: torch.tensor(item) for key, item in given.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: expected a mapping of names to numbers, as in "
            f'{{"input_ids": [[1, 2, 3]]}} ({error})'
        ) from error


def _from_directory(
    path: Path, tokens: int, seed: int
) -> tuple[nn.Module, Batch | None]:
    from transformers import AutoModel, AutoModelForCausalLM

    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json; give {MODEL_FORMS}")
    config = json.loads((path / "config.json").read_text())
    causal = any(
        "CausalLM" in a or "LMHead" in a for a in config.get("architectures", ())
    )
    kind = AutoModelForCausalLM if causal else AutoModel
    model: nn.Module = kind.from_pretrained(path, local_files_only=True).float()
    return model, _text_batch(path) or _random_tokens(model.config, tokens, seed)


def _text_batch(path: Path) -> dict[str, Tensor] | None:
    if not (path / "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return dict(tokenizer(SENTENCES, return_tensors="pt", padding=True))


def _random_tokens(config: Any, tokens: int, seed: int) -> dict[str, Tensor] | None:
    words = getattr(config, "vocab_size", None)
    if words is None:  # a model of images, perhaps: only its user knows a batch
        return None
    rng = torch.Generator().manual_seed(seed)
    shape = (2, min(tokens, getattr(config, "max_position_embeddings", tokens)))
    return {"input_ids": torch.randint(0, words, shape, generator=rng)}


def _callable(place: str, name: str) -> Any:
    module = _file_module(Path(place)) if place.endswith(".py") else _module(place)
    found = getattr(module, name, None)
    if not callable(found):
        raise InputError(f"{place} has no function {name!r}")
    return found


def _module(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise InputError(
            f"cannot import {place!r}: {error}; give {MODEL_FORMS}"
        ) from error


def _file_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
