"""A tensor's memory as an array, without a trace on the tensor."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

VIEWED: dict[torch.dtype, str] = {torch.float32: "=f4", torch.float64: "=f8"}


class _Memory:
    """What NumPy asks of an object whose numbers it may read where they lie."""

    __slots__ = ("__array_interface__",)

    def __init__(self, x: Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(x.shape),
            "typestr": np.dtype(VIEWED[x.dtype]).str,
            "data": (x.data_ptr(), False),
        }


def host_view(x: Tensor) -> npt.NDArray[np.floating[Any]]:
    """Return the values of a contiguous CPU tensor, uncopied; keep x alive meanwhile.

    ``Tensor.numpy()`` forbids the storage to be resized from then on; FSDP
    frees a gathered weight by resizing it, and would fail on every weight we looked at.

    >>> x = torch.ones(2, 3)
    >>> host_view(x).sum(), x.untyped_storage().resizable()
    (np.float32(6.0), True)
    """
    return np.asarray(_Memory(x))
