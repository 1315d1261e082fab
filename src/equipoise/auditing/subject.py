"""The model and the batch of an audit, from what the user typed.

Weights are opened without running code from a checkpoint. A batch may come in any form
that the model takes; the output is its logits, else its hidden states.
"""

import copy
import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.auditing import MODEL_FORMS
from equipoise.auditing.weights.checkpoint import INDEXES, open_checkpoint
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


# A checkpoint is data: no code of its own runs, and nothing is downloaded.
LOCAL = {"local_files_only": True, "trust_remote_code": False}
# What reading a pickle may raise, as its documentation warns.
UNPICKLING = (
    *(UnpicklingError, EOFError, AttributeError, ImportError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
SENTENCES = [
    "A model that trains in one precision may not serve in another.",
    "Where does the error come from, and how large will it be?",
]
MAKE = "--batch FILE (torch.save({'input_ids': ids}, 'batch.pt') makes one)"
LARGEST_JSON = 64 << 20
"""Bytes of a JSON batch; parsed, it takes twenty times as much memory."""
# Attributes of a configuration that bound the length of a sequence.
LENGTHS = ("max_position_embeddings", "n_positions", "context", "block_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What a study was run on, for its first line."""

    name: str
    random: bool = False
    """Made of random tokens: a verdict on noise, whatever the model learnt."""

    def introduce(self, headline: str) -> str:
        """Return a verdict with what it stands on before it."""
        if self.random:
            noise = "NOT on text, so this is no verdict on a trained model"
            return f"Run on {self.name}, {noise}. {headline}"
        return f"Run on {self.name}. {headline}"


def introduced(headline: str, source: ModelSource | None) -> str:
    """Return a verdict with what it stands on before it, where that is known."""
    return headline if source is None else source.introduce(headline)


class ModelAndBatch(NamedTuple):
    """A model, and a batch for it with its source, where there is one."""

    model: nn.Module
    batch: Batch | None
    source: ModelSource | None


def loaded(
    spec: str,
    *,
    text: Path | None = None,
    random_tokens: bool = False,
    tokens: int = 64,
) -> ModelAndBatch:
    """Return the model a string names, and a batch where one is given or asked for.

    Args:
        spec: As typed.
        text: A file of text to be read with the model's own tokenizer.
        random_tokens: Whether to make a batch of random tokens.
        tokens: Length of a sequence of text or of random tokens.
    """
    if Path(spec).is_dir():
        model = _from_directory(Path(spec))
        batch, source = _directory_batch(Path(spec), model, text, tokens)
    else:
        model, batch = _from_function(spec)
        source = ModelSource(name=f"the batch that {spec} returned")
        if text is not None:
            raise InputError(
                f"--text needs a tokenizer, and {spec} brings none: {MAKE}"
            )
    if random_tokens:
        batch, source = _random_batch(spec, model, tokens)
    return ModelAndBatch(model, batch, None if batch is None else source)


def _from_function(spec: str) -> tuple[nn.Module, Batch | None]:
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
    if path.suffix not in {".safetensors", ".pt", ".pth", ".json"}:
        raise InputError(f"{path}: a batch is a .pt, .safetensors or .json file")
    _check_start(path)
    return _from_json(path) if path.suffix == ".json" else _from_tensors(path)


def _check_start(path: Path) -> None:
    """Refuse what cannot be a batch by its first bytes, before all of it is read."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
    if path.suffix == ".json" and size > LARGEST_JSON:
        raise InputError(
            f"{path}: {size / 2**20:.0f} MB of JSON; save so large a batch as .pt or "
            ".safetensors"
        )
    if path.suffix == ".safetensors":
        whole = 8 < int.from_bytes(start, "little") + 8 <= size
    else:
        whole = path.suffix == ".json" or start.startswith((b"PK\x03\x04", b"\x80"))
    if not whole:
        raise InputError(f"{path}: not a whole file of tensors")


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
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{path}: expected a mapping of names to numbers, as in "
            f'{{"input_ids": [[1, 2, 3]]}} ({error})'
        ) from error


def _from_directory(path: Path) -> nn.Module:
    from transformers import AutoModel, AutoModelForCausalLM

    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json; give {MODEL_FORMS}")
    _check_files(path)
    if any((path / name).is_file() for name in INDEXES):
        # A stranger's index may name files elsewhere: refused here, as by an audit.
        open_checkpoint(path)
    config = json.loads((path / "config.json").read_text())
    causal = any(
        "CausalLM" in a or "LMHead" in a for a in config.get("architectures", ())
    )
    kind = AutoModelForCausalLM if causal else AutoModel
    model: nn.Module = kind.from_pretrained(path, **LOCAL).float()
    return model


def _check_files(path: Path) -> None:
    """Refuse a folder with a pipe or a device in it: reading one would never end.

    Links are followed: the Hugging Face cache is made of them.
    """
    for file in path.iterdir():
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise InputError(f"{file} is no regular file: this is no model directory")


def _directory_batch(
    path: Path, model: nn.Module, text: Path | None, tokens: int
) -> tuple[Batch | None, ModelSource | None]:
    """Return the user's text, or two sentences of ours, in the model's own tokens."""
    if not (path / "tokenizer.json").is_file():
        if text is not None:
            raise InputError(
                f"--text needs {path / 'tokenizer.json'}, which is not there: {MAKE}"
            )
        return None, None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, **LOCAL)
    if text is not None:
        ids = torch.tensor(tokenizer(_text(text), verbose=False)["input_ids"])
        ids_BT = _folded(ids, _length(model, tokens), text)
        size = " × ".join(map(str, ids_BT.shape))
        return {"input_ids": ids_BT}, ModelSource(
            name=f"the first {size} tokens of {text}"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    batch = dict(tokenizer(SENTENCES, return_tensors="pt", padding=True))
    return batch, ModelSource(
        name="two English sentences of ours (--text FILE for yours)"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a text file ({error})") from error


def _folded(ids_N: Tensor, tokens: int, text: Path) -> Tensor:
    """Return two sequences of so many tokens; one where the text is too short."""
    if len(ids_N) < 2:
        raise InputError(f"{text} holds {len(ids_N)} tokens: at least 2 are needed")
    rows = 2 if len(ids_N) >= 2 * tokens else 1
    return ids_N[: rows * tokens].view(rows, -1)


def _length(model: nn.Module, tokens: int) -> int:
    config = getattr(model, "config", None)
    limits = (getattr(config, name, None) for name in LENGTHS)
    return min([tokens, *(n for n in limits if isinstance(n, int) and n > 1)])


def _random_batch(
    spec: str, model: nn.Module, tokens: int
) -> tuple[Batch, ModelSource]:
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not (words or tables):  # a model of images, perhaps: only its user knows a batch
        raise InputError(f"{spec} reads no tokens: give a batch with --batch")
    rng = torch.Generator().manual_seed(0)
    shape = (2, _length(model, tokens))
    ids_BT = torch.randint(0, words or tables[0], shape, generator=rng)
    source = ModelSource(name=f"{shape[0]} × {shape[1]} random tokens", random=True)
    return {"input_ids": ids_BT} if Path(spec).is_dir() else ids_BT, source


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
