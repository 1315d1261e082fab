"""Data comes in one order, once, whoever asks and however often they are killed."""

import gzip
import pickle
import platform
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from sklearn.datasets import load_digits

from equipoise.errors import InputError
from equipoise_lab.data import (
    Batches,
    Corpus,
    DataOptions,
    ImageBatches,
    Order,
    Packed,
    RankShare,
    Windows,
    cifar10,
    digits,
    embedded,
    from_bytes,
    mnist,
    open_data,
    text,
    token_file,
)


def test_embedded_corpus_says_what_it_is() -> None:
    corpus = embedded()
    assert corpus.info["python"] == platform.python_version()
    assert len(str(corpus.info["sha256"])) == 64
    assert len(corpus.tokens) == corpus.info["bytes"] > 1_000_000
    assert embedded() is corpus


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 30),
    st.integers(0, 2**40),
)
def test_an_epoch_is_every_example_once(
    batch: int, world: int, extra: int, seed: int
) -> None:
    size = batch * world + extra
    orders = [
        Order(size, batch=batch, seed=seed, share=RankShare(rank=r, world=world))
        for r in range(world)
    ]
    rounds = size // (batch * world)
    for _ in range(2):
        taken = torch.cat([o.take() for _ in range(rounds) for o in orders]).tolist()
        assert len(taken) == len(set(taken)) == rounds * batch * world


def test_another_seed_and_another_epoch_are_other_orders() -> None:
    first, again, other = (Order(50, batch=50, seed=s) for s in (1, 1, 2))
    a, b = first.take(), first.take()
    assert torch.equal(again.take(), a)
    assert not torch.equal(a, b) and not torch.equal(other.take(), a)


def test_windows_predict_the_next_token() -> None:
    corpus = from_bytes(bytes(range(101)))
    data = Windows(corpus, context=10, batch=5)
    x, y = data.take()
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(y, x + 1)
    starts = torch.cat([x[:, 0], data.take()[0][:, 0]])
    assert sorted(starts.tolist()) == list(range(0, 100, 10))


def streamed(folder: Path, *, share: RankShare | None = None) -> Packed:
    from datasets import Dataset

    path = folder / "texts.parquet"
    if not path.exists():
        rows = [f"document {i} " + "x" * (i % 7) for i in range(200)]
        Dataset.from_dict({"text": rows}).to_parquet(path)
    return Packed(path, context=8, batch=2, share=share)


@pytest.mark.parametrize("kind", ["windows", "images", "streamed"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_resuming_continues_where_it_stopped(
    kind: str, after: int, tmp_path: Path
) -> None:
    def fresh() -> Batches:
        if kind == "windows":
            return Windows(from_bytes(bytes(100)), context=4, batch=3)
        if kind == "images":
            return ImageBatches(digits(), batch=3)
        return streamed(tmp_path)

    whole, resumed = fresh(), fresh()
    for _ in range(after):
        whole.take()
    resumed.restore(whole.state())
    for _ in range(3):
        for a, b in zip(whole.take(), resumed.take(), strict=True):
            assert torch.equal(a, b)


def test_a_stream_can_be_rewound(tmp_path: Path) -> None:
    data = streamed(tmp_path)
    start, first = data.state(), data.take()
    data.take()
    data.restore(start)
    assert torch.equal(data.take()[0], first[0])


def test_streamed_documents_are_packed_and_not_shared(tmp_path: Path) -> None:
    line = torch.cat([streamed(tmp_path).take()[0].flatten() for _ in range(1)])
    assert bytes(line[:11].tolist()) == b"document 0 " and line[11] == 256
    first = [
        streamed(tmp_path, share=RankShare(rank=r, world=2)).take() for r in (0, 1)
    ]
    heads = [bytes(x[0, :8].tolist() + x[1, :3].tolist()) for x, _ in first]
    assert heads == [b"document 0 ", b"document 1 "]


def test_packing_loses_no_token(tmp_path: Path) -> None:
    data = streamed(tmp_path)
    x, y = data.take()
    x2, _ = data.take()
    assert y[-1, -1] == x2[0, 0] and torch.equal(x.flatten()[1:], y.flatten()[:-1])


def test_streaming_says_when_the_data_ends(tmp_path: Path) -> None:
    data = streamed(tmp_path)
    with pytest.raises(InputError, match="ended after 200 documents"):
        for _ in range(1000):
            data.take()
    data = streamed(tmp_path)
    data.column = "body"
    with pytest.raises(InputError, match="no column 'body'; it has text"):
        data.take()
    with pytest.raises(InputError, match="no parquet file"):
        Packed(tmp_path / "none.parquet", context=8, batch=2).take()


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab")
    (tmp_path / "b.txt").write_bytes(b"c")
    both = text([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert bytes(both.tokens) == b"abc" and both.info["source"] == "a.txt, b.txt"
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    mapped = token_file(tmp_path / "train.bin")
    assert isinstance(mapped.tokens, np.memmap) and mapped.tokens[999] == 999
    x, _ = Windows(mapped, context=9, batch=2).take()
    assert x.dtype == torch.int64


def idx(array: np.ndarray) -> bytes:
    shape = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_files(packed: bool, tmp_path: Path) -> None:
    pixels = np.arange(3 * 28 * 28).reshape(3, 28, 28) % 256
    for name, array in (
        ("t10k-images-idx3-ubyte", pixels),
        ("t10k-labels-idx1-ubyte", np.array([7, 0, 9])),
    ):
        raw = idx(array)
        path = tmp_path / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(raw) if packed else raw)
    found = mnist(tmp_path, train=False)
    assert found.label_N.tolist() == [7, 0, 9] and found.classes == 10
    expected = torch.from_numpy(pixels[1]).float() / 127.5 - 1
    assert torch.equal(found.image_NIYX[1, 0], expected)


def test_cifar_binary_and_python_agree(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
    labels = [3, 1, 4, 9]
    rows = np.column_stack([np.array(labels, np.uint8), pixels])
    (tmp_path / "bin").mkdir()
    rows.tofile(tmp_path / "bin" / "test_batch.bin")
    (tmp_path / "py").mkdir()
    batch = {b"data": pixels, b"labels": labels}
    (tmp_path / "py" / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    a, b = (cifar10(tmp_path / kind, train=False) for kind in ("bin", "py"))
    assert torch.equal(a.image_NIYX, b.image_NIYX)
    assert torch.equal(a.label_N, b.label_N)
    second = a.image_NIYX[0, 0, 0, 1].item()
    assert second == pytest.approx(pixels[0, 1] / 127.5 - 1, abs=1e-6)


def test_cifar_strips_are_rows_of_pixels(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    pixel_NPC = rng.integers(0, 256, (3, 1024, 3), dtype=np.uint8)
    Image.fromarray(pixel_NPC).save(tmp_path / "test_batch.png")
    labels = tmp_path / "test_lables.json"
    labels.write_text("[3, 8, 0]")
    found = cifar10(tmp_path, train=False)
    assert found.label_N.tolist() == [3, 8, 0]
    # Channel 2 of the pixel in row 1, column 5.
    expected = pixel_NPC[1, 32 + 5, 2] / 127.5 - 1
    assert found.image_NIYX[1, 2, 1, 5].item() == pytest.approx(expected, abs=1e-6)
    labels.write_text("[3]")
    with pytest.raises(InputError, match="1 labels are not CIFAR-10"):
        cifar10(tmp_path, train=False)


def test_text_may_be_packed(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"abc"))
    assert text(tmp_path / "a.gz").tokens.tolist() == [97, 98, 99]


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("owned",))


def test_a_batch_that_runs_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(InputError, match="never needs builtins.print"):
        cifar10(tmp_path, train=False)


def test_digits_are_split_without_overlap() -> None:
    train, held_out = digits(), digits(train=False)
    # The last of every five, or finished runs would have been trained on others.
    assert held_out.label_N.tolist() == load_digits().target[4::5].tolist()
    assert len(train.label_N) + len(held_out.label_N) == 1797
    assert train.image_NIYX.shape[1:] == (1, 8, 8)
    assert train.image_NIYX.aminmax() == (-1, 1)


@pytest.mark.parametrize("source", ["embedded", "digits"])
def test_named_sources_open(source: str) -> None:
    options = DataOptions(source=source)  # type: ignore[arg-type]
    opened = open_data(options, batch=2, seed=0, context=8)
    assert opened.info["corpus"]["source"]
    assert opened.validation is not None
    assert len(opened.train.take()[0]) == len(opened.validation.take()[0]) == 2


def test_files_open_by_name(tmp_path: Path) -> None:
    streamed(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"ab" * 200)
    for source, path in (("text", "a.txt"), ("tokens", "a.txt")):
        options = DataOptions(source=source, path=str(tmp_path / path))  # type: ignore[arg-type]
        assert open_data(options, batch=2, seed=0, context=8).train.take()
    options = DataOptions(source="streaming", path=str(tmp_path / "texts.parquet"))
    opened = open_data(options, batch=2, seed=0, context=8)
    assert opened.validation is None and opened.train.take()


def broken(folder: Path, name: str, content: bytes = b"") -> Path:
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda f: text(f / "none.txt"), "no file"),
        (lambda f: text(broken(f, "a") / "a"), "corpus a is empty"),
        (lambda f: text(broken(f, "a.gz", b"abc") / "a.gz"), "not a whole gzip file"),
        (lambda f: token_file(broken(f, "a", b"abc") / "a"), "uint16"),
        (
            lambda f: cifar10(broken(f, "test_batch", b"abc"), train=False),
            "not a CIFAR",
        ),
        (
            lambda f: cifar10(
                broken(broken(f, "test_lables.json", b"[]"), "test_batch.png", b"abc"),
                train=False,
            ),
            "not a picture",
        ),
        (lambda f: token_file(broken(f, "a") / "a"), "0 bytes"),
        (lambda f: mnist(f), "no file train-images-idx3-ubyte in"),
        (lambda f: mnist(broken(f, "train-images-idx3-ubyte", b"xyz")), "not an idx"),
        (
            lambda f: mnist(
                broken(f, "train-images-idx3-ubyte", b"\0\0\x08\x01\0\0\0\x09")
            ),
            "0 bytes where",
        ),
        (
            lambda f: cifar10(broken(f, "test_batch.bin", b"abc"), train=False),
            "not a CIFAR-10 batch: 3 bytes",
        ),
        (
            lambda f: cifar10(broken(f, "test_batch", pickle.dumps(1)), train=False),
            "no data and labels",
        ),
        (lambda f: Windows(from_bytes(b"abc"), context=4, batch=1), "no window of 4"),
        (lambda f: Order(3, batch=2, share=RankShare(world=2)), "smaller batch"),
        (lambda f: RankShare(rank=2, world=2), "rank 2"),
        (lambda f: DataOptions(source="web"), "must be one of embedded"),  # type: ignore[arg-type]
        (lambda f: DataOptions(source="text"), "needs a path"),
        (lambda f: DataOptions(held_out=1.0), "held_out"),
        (lambda f: from_bytes(b"abc").split(0.9), "is empty"),
        (lambda f: Corpus(tokens=np.zeros(1, np.uint8), vocabulary=1), "is empty"),
    ],
)
def test_bad_input_is_one_line(read: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read(tmp_path)  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_images_and_labels_must_match() -> None:
    from equipoise_lab.data import Images

    with pytest.raises(InputError, match="2 images and 1 labels"):
        Images(image_NIYX=torch.zeros(2, 1, 4, 4), label_N=torch.zeros(1))
