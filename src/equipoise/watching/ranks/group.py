"""The ranks of one training: which one writes, and one exchange per sampled step."""

import json
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from equipoise.watching.ranks.merge import RankSample

log = logging.getLogger("equipoise")

ATTACH_TIMEOUT_S = 60.0
"""How long the ranks wait for each other to attach."""
FINAL_TIMEOUT_S = 5.0
EXCHANGE_TIMEOUT_S = 20.0
"""How long the exchange of a sampled step waits for a rank that is elsewhere."""
LEAST_BYTES = 1 << 16
Json = Any


class Ranks(Protocol):
    """The ranks that watch one training together."""

    rank: int
    count: int

    def broadcast(self, name: str, value: Json) -> Json: ...

    def reserve(self, size: int) -> None: ...

    def exchange(self, message: RankSample) -> Sequence[RankSample]: ...

    def final_exchange(self, message: RankSample) -> Sequence[RankSample]: ...


class SingleRank:
    """A training in one process, or one that is watched process by process."""

    count = 1

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def broadcast(self, name: str, value: Json) -> Json:
        return value

    def reserve(self, size: int) -> None:
        pass  # nothing travels

    def exchange(self, message: RankSample) -> Sequence[RankSample]:
        return [message]

    def final_exchange(self, message: RankSample) -> Sequence[RankSample]:
        return [message]


class GroupRanks:
    """All ranks of the default process group, one file, one exchange per sample.

    The exchange is one ``all_gather`` of a buffer whose size all ranks know: a power of
    two well above the largest message seen so far. A message that does not
    fit is announced by its size in the first eight bytes; all ranks then enlarge the
    buffer.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._capacity = LEAST_BYTES
        self.collectives = 0
        # Our own: in the user's group, what a late rank sends would be paired with the
        # user's next collective. On the host: messages are there already.
        self._group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S)
        )

    def broadcast(self, name: str, value: Json) -> Json:
        """Return the value that the first rank gives, on every rank."""
        if self.rank == 0:
            self._store.set(name, json.dumps(value))
        return json.loads(self._store.get(name))

    def reserve(self, size: int) -> None:
        """Make room for so many bytes more, as the first rank counts them."""
        self._capacity += self.broadcast("room", size)

    def exchange(self, message: RankSample) -> Sequence[RankSample]:
        """Return every rank's message; none if one did not fit.

        Raises:
            RuntimeError: If a rank has ended, or does not arrive in time.
        """
        received = self._gathered(message.to_bytes())
        sizes = [int.from_bytes(part[:8], "little") for part in received]
        if max(sizes) + 8 > self._capacity:
            # Twice what was needed: the next message carries this one's scalars too.
            self._capacity = 2 << (max(sizes) + 8).bit_length()
            return []
        parts = zip(received, sizes, strict=True)
        return [RankSample.from_bytes(part[8 : 8 + size]) for part, size in parts]

    def final_exchange(self, message: RankSample) -> Sequence[RankSample]:
        """Return every rank's last message, through the store: some may be gone."""
        names = [f"bye/{rank}" for rank in range(self.count)]
        try:
            self._store.set(names[self.rank], message.to_bytes())
            self._store.wait(names, timedelta(seconds=FINAL_TIMEOUT_S))
            return [RankSample.from_bytes(self._store.get(name)) for name in names]
        except RuntimeError:
            return [message]

    def _gathered(self, packed: bytes) -> list[bytes]:
        body = packed if len(packed) + 8 <= self._capacity else b""
        sent = len(packed).to_bytes(8, "little") + body
        buffer = torch.frombuffer(
            bytearray(sent.ljust(self._capacity, b"\0")), dtype=torch.uint8
        )
        out: list[Tensor] = [torch.empty_like(buffer) for _ in range(self.count)]
        self.collectives += 1
        dist.all_gather(out, buffer, group=self._group)
        return [bytes(part.numpy()) for part in out]


_groups_connected = 0


def connect_ranks() -> Ranks:
    """Return the ranks that watch with us, agreed on without a collective.

    A user may call ``watch`` on the first rank only; a collective would then wait for
    ever. The group's key-value store holds which ranks called, and the first rank to
    decide whether all did decides for all.
    """
    global _groups_connected
    if (
        not (dist.is_available() and dist.is_initialized())
        or dist.get_world_size() == 1
    ):
        return SingleRank()
    _groups_connected += 1
    store = PrefixStore(f"equipoise/{_groups_connected}", _store())
    store.set(f"here/{dist.get_rank()}", "1")
    names = [f"here/{rank}" for rank in range(dist.get_world_size())]
    try:
        store.wait(names, timedelta(seconds=ATTACH_TIMEOUT_S))
        decision = "together"
    except RuntimeError:
        decision = "apart"
    verdict = store.compare_set("verdict", "", decision)
    if verdict in (b"together", "together"):
        return GroupRanks(store)
    log.warning(
        "equipoise: only some ranks called watch; values are of this rank alone. "
        "Call it on every rank to read the full model"
    )
    return SingleRank()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
