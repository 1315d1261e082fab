"""Options that name a data set, and the batches they open."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from equipoise.errors import InputError
from equipoise.lab.data import corpus, images
from equipoise.lab.data.batches import Batches, ImageBatches, Images, Windows, share
from equipoise.lab.data.streaming import FINEWEB, Packed, byte_tokens, tokenizer
from equipoise.lab.options import one_of, require

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
class Opened:
    """Batches to train on, batches to judge by, and what to write into the run."""

    train: Batches
    validation: Batches | None
    info: dict[str, Any]


def open_data(
    options: DataOptions, *, batch: int, seed: int, context: int = 0
) -> Opened:
    """Return the batches that ``options`` name; one seed, one order."""
    if options.source in get_args(Pictures):
        return _pictures(options, batch=batch, seed=seed)
    if options.source == "streaming":
        return _streaming(options, batch=batch, context=context)
    whole = _corpus(options)
    training, held_out = whole.split(options.held_out)
    mine = share()
    return Opened(
        train=Windows(training, context=context, batch=batch, seed=seed, share=mine),
        validation=Windows(held_out, context=context, batch=batch, seed=0, share=mine),
        info={"corpus": dict(whole.info)},
    )


def _corpus(options: DataOptions) -> corpus.Corpus:
    if options.source == "text":
        return corpus.text(options.path)
    if options.source == "tokens":
        return corpus.token_file(options.path)
    return corpus.embedded()


def _streaming(options: DataOptions, *, batch: int, context: int) -> Opened:
    encode = tokenizer(options.tokenizer) if options.tokenizer else byte_tokens
    source = options.path or FINEWEB
    packed = Packed(source, context=context, batch=batch, encode=encode, share=share())
    info = {"source": source, "tokenizer": options.tokenizer or "bytes"}
    return Opened(train=packed, validation=None, info={"corpus": info})


def _pictures(options: DataOptions, *, batch: int, seed: int) -> Opened:
    def part(train: bool) -> Images:
        match options.source:
            case "mnist":
                return images.mnist(options.path, train=train)
            case "cifar10":
                return images.cifar10(options.path, train=train)
            case _:
                return images.digits(train=train)

    mine = share()
    return Opened(
        train=ImageBatches(part(True), batch=batch, seed=seed, share=mine),
        validation=ImageBatches(part(False), batch=batch, seed=0, share=mine),
        info={"corpus": {"source": options.source}},
    )
