"""Sources of data: options that name one, images from their files, batches opened.

Images come from their standard files: MNIST idx, CIFAR-10 batches or strips.
"""

import json
import pickle
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from equipoise.errors import InputError
from equipoise_lab.data.batches import (
    FINEWEB,
    Batches,
    ImageBatches,
    Images,
    Packed,
    Windows,
    byte_tokens,
    share,
    tokenizer,
)
from equipoise_lab.data.corpus import Corpus, embedded, text, token_file, unzipped
from equipoise_lab.options import one_of, require

Bytes = npt.NDArray[np.uint8]


def mnist(folder: str | Path, *, train: bool = True) -> Images:
    """Return MNIST (or Fashion-MNIST) from its idx files, gzipped or not."""
    part = "train" if train else "t10k"
    image_NYX = idx(_beside(folder, f"{part}-images-idx3-ubyte"))
    label_N = idx(_beside(folder, f"{part}-labels-idx1-ubyte"))
    return _images(image_NYX[:, None], label_N)


def idx(path: Path) -> Bytes:
    """Return the array of an idx file of bytes."""
    raw = unzipped(path)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise InputError(f"{path} is not an idx file of bytes")
    axes = raw[3]
    shape = tuple(np.frombuffer(raw, ">u4", axes, 4).tolist())
    data = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes)
    if len(data) != np.prod(shape):
        raise InputError(f"{path} holds {len(data)} bytes where {shape} are announced")
    return data.reshape(shape)


def cifar10(folder: str | Path, *, train: bool = True) -> Images:
    """Return CIFAR-10 from its binary or Python version, or from strips of pixels."""
    names = [f"data_batch_{n}" for n in range(1, 6)] if train else ["test_batch"]
    binary = [Path(folder) / f"{name}.bin" for name in names]
    if all(path.is_file() for path in binary):
        rows = np.concatenate([_binary_rows(path) for path in binary])
        return _images(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0])
    strips = [Path(folder) / f"{name}.png" for name in names]
    if all(path.is_file() for path in strips):
        part = "train" if train else "test"
        return _strips(strips, _beside(folder, f"{part}_lables.json"))  # so spelt
    batches = [_python_batch(_beside(folder, name)) for name in names]
    pixels = np.concatenate([batch[b"data"] for batch in batches])
    labels = np.concatenate([batch[b"labels"] for batch in batches])
    return _images(pixels.reshape(-1, 3, 32, 32), labels)


def digits(*, train: bool = True) -> Images:
    """Return scikit-learn's 8 × 8 digits, which it carries; every fifth is held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    held_out = np.arange(len(found.target)) % 5 == 4
    chosen = ~held_out if train else held_out
    pixels = (found.images[chosen] * (255 / 16)).round().astype(np.uint8)
    return _images(pixels[:, None], found.target[chosen])


def _binary_rows(path: Path) -> Bytes:
    raw = np.fromfile(path, np.uint8)
    if not len(raw) or len(raw) % 3073:
        raise InputError(f"{path} is not a CIFAR-10 batch: {len(raw)} bytes")
    return raw.reshape(-1, 3073)


def _strips(paths: list[Path], labels: Path) -> Images:
    """Return images kept as PNG files in which a row of 1024 pixels is an image."""
    from PIL import Image

    rows = []
    for path in paths:
        try:
            with Image.open(path) as opened:
                rows.append(np.asarray(opened.convert("RGB")))
        except OSError as error:  # Pillow's own are kinds of it
            raise InputError(f"{path} is not a picture: {error}") from error
    pixel_NPC = np.concatenate(rows)
    label_N = np.asarray(json.loads(labels.read_text()))
    if pixel_NPC.shape[1:] != (1024, 3) or len(label_N) != len(pixel_NPC):
        raise InputError(
            f"{paths[0].parent}: strips of shape {pixel_NPC.shape} and {len(label_N)} "
            "labels are not CIFAR-10, whose images are rows of 1024 pixels"
        )
    return _images(pixel_NPC.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2), label_N)


# All that the published batches need. A pickle that asks for more is not one of them.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise InputError(f"a CIFAR-10 batch never needs {module}.{name}: refused")
        return super().find_class(module, name)


def _python_batch(path: Path) -> dict[bytes, Any]:
    try:
        batch = _Arrays(BytesIO(path.read_bytes()), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise InputError(f"{path} is not a CIFAR-10 batch: {error}") from error
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise InputError(f"{path} is not a CIFAR-10 batch: no data and labels in it")
    return batch


def _beside(folder: str | Path, name: str) -> Path:
    for path in (Path(folder) / name, Path(folder) / f"{name}.gz"):
        if path.is_file():
            return path
    raise InputError(f"no file {name} in {folder}")


def _images(pixel_NIYX: npt.NDArray[Any], label_N: npt.NDArray[Any]) -> Images:
    scaled = torch.from_numpy(pixel_NIYX.astype(np.float32)) / 127.5 - 1
    labels = torch.from_numpy(np.asarray(label_N, dtype=np.int64))
    return Images(image_NIYX=scaled, label_N=labels, classes=int(labels.max()) + 1)


Text = Literal["embedded", "text", "tokens", "streaming"]
Pictures = Literal["digits", "mnist", "cifar10"]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which data, and how much of it is held out."""

    source: Text | Pictures = "embedded"
    path: str = ""
    """Of the file or folder; for streaming, FineWeb's name unless given."""
    tokenizer: str = ""
    """For streaming: a Hugging Face tokenizer; bytes unless given."""
    held_out: float = 0.1

    def __post_init__(self) -> None:
        one_of("source", self.source, (*get_args(Text), *get_args(Pictures)))
        require(0 < self.held_out < 1, f"held_out {self.held_out} is not in (0, 1)")
        needs_path = self.source in {"text", "tokens", "mnist", "cifar10"}
        if needs_path and not self.path:
            raise InputError(f"the data source {self.source} needs a path")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Batches to train on, batches to evaluate with, and what to write into the run."""

    train: Batches
    validation: Batches | None
    info: dict[str, Any]


def open_data(
    options: DataOptions, *, batch: int, seed: int, context: int = 0
) -> Dataset:
    """Return the batches that ``options`` name; one seed, one order."""
    if options.source in get_args(Pictures):
        return _pictures(options, batch=batch, seed=seed)
    if options.source == "streaming":
        return _streaming(options, batch=batch, context=context)
    whole = _corpus(options)
    training, held_out = whole.split(options.held_out)
    mine = share()
    return Dataset(
        train=Windows(training, context=context, batch=batch, seed=seed, share=mine),
        validation=Windows(held_out, context=context, batch=batch, seed=0, share=mine),
        info={"corpus": dict(whole.info)},
    )


def _corpus(options: DataOptions) -> Corpus:
    if options.source == "text":
        return text(options.path)
    if options.source == "tokens":
        return token_file(options.path)
    return embedded()


def _streaming(options: DataOptions, *, batch: int, context: int) -> Dataset:
    encode = tokenizer(options.tokenizer) if options.tokenizer else byte_tokens
    source = options.path or FINEWEB
    packed = Packed(source, context=context, batch=batch, encode=encode, share=share())
    info = {"source": source, "tokenizer": options.tokenizer or "bytes"}
    return Dataset(train=packed, validation=None, info={"corpus": info})


def _pictures(options: DataOptions, *, batch: int, seed: int) -> Dataset:
    def part(train: bool) -> Images:
        match options.source:
            case "mnist":
                return mnist(options.path, train=train)
            case "cifar10":
                return cifar10(options.path, train=train)
            case _:
                return digits(train=train)

    mine = share()
    return Dataset(
        train=ImageBatches(part(True), batch=batch, seed=seed, share=mine),
        validation=ImageBatches(part(False), batch=batch, seed=0, share=mine),
        info={"corpus": {"source": options.source}},
    )
