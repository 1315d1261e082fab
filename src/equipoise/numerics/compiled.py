"""Compile scalar kernels, and run them on a few threads of our own.

Compiled loops release the interpreter lock and are split over a small pool; numba's own
``parallel=True`` is avoided, since it kills forked children and aborts under threads.
Without numba the same functions run interpreted: slow, and equally right. They read a
tensor's memory as an array, without a trace on the tensor. What goes the other way,
to a device, is not waited for.
"""

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

try:
    import numba
    from numba.extending import lower_builtin, register_jitable, type_callable
except ImportError:
    numba = None

Kernel = TypeVar("Kernel", bound=Callable[..., Any])
COMPILED = numba is not None
# Below this many entries a second thread costs more than it saves.
_ENTRIES_PER_THREAD = 1 << 15


@lru_cache(maxsize=1)
def cache_folder() -> Path:
    """Return where machine code is kept: per user, and per version of these sources.

    numba looks only at the file that holds a kernel, not at the files it calls, so
    an upgrade could run stale code; a folder named after all sources cannot.
    """
    home = Path("~").expanduser()
    base = {
        "darwin": home / "Library" / "Caches",
        "win32": Path(os.environ.get("LOCALAPPDATA", home)),
    }.get(sys.platform, Path(os.environ.get("XDG_CACHE_HOME", home / ".cache")))
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        text = source.read_bytes()
        if b"@compiled" in text or b"@inner" in text:
            digest.update(text)
    return base / "equipoise" / f"kernels-{digest.hexdigest()[:12]}"


@contextlib.contextmanager
def _caching_in(folder: Path) -> Iterator[None]:
    """Point numba's cache at ``folder`` while one kernel is declared."""
    theirs = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = theirs or str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = theirs


def compiled(*, reorder: bool = False) -> Callable[[Kernel], Kernel]:
    """Return a decorator that compiles a kernel, cached where the user may write.

    Args:
        reorder: Let sums be reassociated, which is what vectorises them. NaN and Inf
            keep their meaning.
    """

    def declare(kernel: Kernel) -> Kernel:
        if not COMPILED:
            return kernel
        options = {"nogil": True, "no_cfunc_wrapper": True, **_options(reorder=reorder)}
        try:
            with _caching_in(cache_folder()):
                return numba.njit(cache=True, **options)(kernel)  # type: ignore[no-any-return]
        except (RuntimeError, OSError):  # nowhere to write: compile in every process
            return numba.njit(**options)(kernel)  # type: ignore[no-any-return]

    return declare


def inner(*, reorder: bool = False, fuse: bool = False) -> Callable[[Kernel], Kernel]:
    """Return a decorator for what only compiled kernels call; Python runs it as it is.

    No entry for the interpreter is compiled, which is a quarter of a kernel's cost.

    Args:
        reorder: As for ``compiled``.
        fuse: Let a·b + c round once where the processor can; sums keep their order.
    """

    def declare(kernel: Kernel) -> Kernel:
        if not COMPILED:
            return kernel
        options = _options(reorder=reorder, fuse=fuse)
        return register_jitable(**options)(kernel)  # type: ignore[no-any-return]

    return declare


def _options(*, reorder: bool, fuse: bool = False) -> dict[str, Any]:
    allowed = {"contract"} if fuse or reorder else set()
    allowed |= {"reassoc"} if reorder else set()
    return {"error_model": "numpy", "fastmath": allowed or False}


def bits(x: Any) -> Any:
    """Return the bit pattern of a float32 as an int32.

    >>> bits(np.float32(1)) == 127 << 23
    np.True_
    """
    return np.float32(x).view(np.int32)


def single(pattern: Any) -> Any:
    """Return the float32 that has a bit pattern.

    >>> single(127 << 23)
    np.float32(1.0)
    """
    return np.int32(pattern).view(np.float32)


def _pointer(address: int) -> Any:
    """Return an address as compiled code wants it."""
    raise NotImplementedError("only compiled code has pointers")


@inner()
def singles_at(address: int, size: int) -> Any:
    """Return the float32 numbers at an address; only compiled code can."""
    return numba.carray(_pointer(address), size, np.float32)


def _reinterpreted(function: Callable[[Any], Any], *, given: Any, made: Any) -> None:
    """Compile to one instruction what ``.view`` compiles several functions for."""

    def typed(context: Any) -> Callable[[Any], Any]:
        return lambda x: made if x == given else None

    def lowered(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (x,), to = args, context.get_value_type(made)
        if given == numba.int64:  # what numba makes of a sum of two int32
            x = builder.trunc(x, context.get_value_type(numba.int32))
        return builder.bitcast(x, to)

    type_callable(function)(typed)
    lower_builtin(function, given)(lowered)


def _as_pointer() -> None:
    def typed(context: Any) -> Callable[[Any], Any]:
        return lambda address: numba.types.voidptr

    def lowered(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    type_callable(_pointer)(typed)
    lower_builtin(_pointer, numba.int64)(lowered)


if COMPILED:
    _reinterpreted(bits, given=numba.float32, made=numba.int32)
    _reinterpreted(single, given=numba.int32, made=numba.float32)
    _reinterpreted(single, given=numba.int64, made=numba.float32)
    _as_pointer()


@lru_cache(maxsize=4)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return this process's pool; a forked child has a new id and makes its own."""
    return ThreadPoolExecutor(
        threads, thread_name_prefix="equipoise", initializer=_mark_worker
    )


# A worker that waited for the pool it works in would wait for ever.
_thread = threading.local()


def _mark_worker() -> None:
    _thread.is_worker = True


def over_rows(work: Callable[[int, int], None], rows: int, row_length: int) -> None:
    """Call ``work(start, stop)`` on slices covering all rows, on torch's thread count.

    Four slices per thread: causal rows grow, so equal slices are not equal work.
    """
    threads = min(torch.get_num_threads(), rows * row_length // _ENTRIES_PER_THREAD)
    if threads < 2 or getattr(_thread, "is_worker", False):
        work(0, rows)
        return
    edges = [rows * i // (4 * threads) for i in range(4 * threads + 1)]
    for _ in _pool(os.getpid(), threads).map(work, edges[:-1], edges[1:]):
        pass


VIEWED = {torch.float32: np.dtype("=f4").str, torch.float64: np.dtype("=f8").str}


class _Memory:
    """What NumPy asks of an object whose numbers it may read where they lie.

    An array keeps this object, and it keeps the tensor: of a temporary one the memory
    would be free, and another's, while it is read.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, x: Tensor) -> None:
        self._tensor = x
        self.__array_interface__ = {
            "version": 3,
            "shape": x.shape,
            "typestr": VIEWED[x.dtype],
            "data": (x.data_ptr(), False),
        }


def host_view(x: Tensor) -> npt.NDArray[np.floating[Any]]:
    """Return the values of a contiguous CPU tensor, uncopied; the array keeps x.

    ``Tensor.numpy()`` forbids the storage to be resized from then on; FSDP
    frees a gathered weight by resizing it, and would fail on every weight we looked at.

    >>> x = torch.ones(2, 3)
    >>> host_view(x).sum(), x.untyped_storage().resizable()
    (np.float32(6.0), True)
    """
    return np.asarray(_Memory(x))


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, without waiting for the device.

    From pageable memory, and by ``torch.tensor(…, device=…)``, a copy to a GPU starts
    only once all work before it is done, and the host waits for that.
    """
    pinned = x.pin_memory() if device.type == "cuda" and x.is_cpu else x
    return pinned.to(device, non_blocking=True)
