"""Compile the CPU kernels that the default probes use: once per machine and version.

The first sampled step would otherwise stand still for seconds without a word. Compiled
code is kept in the user's cache directory; a marker there says that it is complete.
"""

import contextlib
import time
from collections.abc import Callable

import torch

from equipoise.numerics.compiled import COMPILED, cache_folder
from equipoise.numerics.rows import statistics
from equipoise.numerics.spectra.lanczos import space
from equipoise.numerics.spectra.norm import spectral_norm
from equipoise.numerics.token_statistics import (
    adam_norms,
    kurtosis,
    token_cosine,
    token_sizes,
)

MARKER = "compiled"
NOTICE = (
    "compiling CPU kernels, once for this installation (some seconds); "
    "`equipoise warmup` does it ahead of time"
)


def compile_kernels(notify: Callable[[str], None]) -> float:
    """Compile what is not in the cache yet; return the CPU seconds it took.

    Nothing is drawn from a global generator. Where the cache cannot be written, every
    process compiles for itself, and says so every time.

    Args:
        notify: Called with one line before anything is compiled.
    """
    marker = cache_folder() / MARKER
    if not COMPILED or marker.exists():
        return 0.0
    notify(NOTICE)
    begin = time.process_time()
    statistics.warm_up()
    x_NN = torch.eye(130)
    token_sizes(x_NN)
    kurtosis(x_NN)
    token_cosine(x_NN[None])
    adam_norms([x_NN], [x_NN], floors=[1.0], rates=[1.0])
    space(x_NN, x_NN[0].numpy(), steps=2)
    spectral_norm(x_NN)
    with contextlib.suppress(OSError):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    return time.process_time() - begin
