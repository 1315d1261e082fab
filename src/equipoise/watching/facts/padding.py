"""Where a batch of ids is padded, by what is declared or by what the ids show.

Axes, in this file:  B sequence · T token.
"""

import torch
from torch import Tensor


def padded_BT(ids_BT: Tensor, *, declared: int | None) -> Tensor:
    """Return where tokens are padding: nowhere unless it is sure.

    A declared id is padding if it stands at the ends of sequences, twice in a row at
    least, and nowhere else: configurations declare 0 where 0 is a token of the text.
    Without one, an id is if it fills the ends of at least half of the sequences, by
    different lengths, and is found nowhere else. One other id (a mask's) may stand
    among it, as masked models put it.

    >>> padded_BT(torch.tensor([[5, 6, 0], [7, 0, 0], [5, 0, 0]]), declared=0)[0]
    tensor([False, False,  True])
    """
    if declared is not None:
        right_BT = _run(ids_BT == declared)
        left_BT = _run((ids_BT == declared).flip(1)).flip(1)
        ends_BT = right_BT | left_BT
        alone = ((ids_BT == declared) & ~ends_BT).sum() == 0
        longest = torch.maximum(right_BT.sum(1).amax(), left_BT.sum(1).amax())
        return ends_BT & alone & (longest >= 2)
    right_BT = _guessed(ids_BT)
    return right_BT | _guessed(ids_BT.flip(1)).flip(1)


def _run(same_BT: Tensor) -> Tensor:
    """Return where every token from here to the end is one of the same."""
    return same_BT.flip(1).int().cumprod(1).flip(1).bool()


def _guessed(ids_BT: Tensor) -> Tensor:
    """Return padding at the right ends that nothing declares."""
    if len(ids_BT) < 2:
        return torch.zeros_like(ids_BT, dtype=torch.bool)
    last_B = ids_BT[:, -1]
    count_B = (last_B[:, None] == last_B).sum(1)
    first = last_B.take(count_B.argmax())
    second = last_B.take(count_B.masked_fill(last_B == first, 0).argmax())
    return _filled(ids_BT, first, second) | _filled(ids_BT, second, first)


def _filled(ids_BT: Tensor, padding: Tensor, mask: Tensor) -> Tensor:
    """Return where padding fills the ends, if all that has to hold of it does."""
    here_BT = ids_BT == padding
    run_BT = _run(here_BT | (ids_BT == mask))
    begun_BT = here_BT.int().cumsum(1) > 0
    ends_BT = run_BT & begun_BT
    length_B = ends_BT.sum(1)
    alone = (here_BT & ~ends_BT).sum() == 0
    often = 2 * ((here_BT & ends_BT).sum(1) >= 2).sum() >= len(ids_BT)
    uneven = length_B.amax() > length_B.amin()
    return ends_BT & (alone & often & uneven & (length_B.amax() < ids_BT.shape[1]))
