"""A tensor's memory as an array, without a trace on the tensor."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CTYPES: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
}


def host_view(x: Tensor) -> npt.NDArray[np.floating[Any]]:
    """Return the values of a contiguous CPU tensor, uncopied; keep x alive meanwhile.

    ``Tensor.numpy()`` forbids the storage to be resized from then on, for ever; FSDP
    frees a gathered weight by resizing it, and would fail on every weight we looked at.

    >>> x = torch.ones(2, 3)
    >>> host_view(x).sum(), x.untyped_storage().resizable()
    (np.float32(6.0), True)
    """
    buffer = (CTYPES[x.dtype] * x.numel()).from_address(x.data_ptr())
    return np.frombuffer(buffer, np.dtype(CTYPES[x.dtype])).reshape(x.shape)
