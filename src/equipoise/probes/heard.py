"""Which sites ran and which were heard, and by which name a call is filed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import listening
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.interception import Interceptor
from equipoise.anatomy.shards import head_split
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.emission import Emit


@dataclass(slots=True)
class Heard:
    """What one sampled step showed of each attention site, by name."""

    passed: bool = False
    """Whether a forward pass began while we listened."""
    ran: set[str] = field(default_factory=set)
    """Sites whose forward ran to its end: one that raised had no chance to speak."""
    attention: set[str] = field(default_factory=set)
    """Sites whose attention was read."""
    first_heads: dict[str, int] = field(default_factory=dict)
    """Of the sites whose first heads other ranks hold: which head is the first here."""

    def attach(self, anatomy: Anatomy) -> Iterator[RemovableHandle]:
        """Yield one hook per expected site, which notes that it ran."""
        self.passed = True
        for site in anatomy.attention:
            yield listening.after(site.module, _note(self.ran, site.name))


def _note(names: set[str], name: str) -> Callable[..., None]:
    def note(module: Any, args: Any, output: Any) -> None:
        names.add(name)

    return note


class AttentionTap:
    """Hands each attention call to the listeners, under its caller's name."""

    def __init__(
        self,
        anatomy: Anatomy,
        listeners: Sequence[Callable[..., None]],
        emit: Emit,
        *,
        heard: Heard,
    ) -> None:
        self._anatomy, self._listeners, self._emit = anatomy, listeners, emit
        self._calls: dict[str, int] = {}
        self._heard_sites, self._first_heads = heard.attention, heard.first_heads

    def interceptor(self, guarded: Callable[..., Any]) -> Interceptor:
        return Interceptor(self._anatomy, self._heard, guarded=guarded)

    def _heard(self, call: AttentionCall) -> None:
        site = self._site(call)
        if 0 in call.shape:  # a batch without rows
            return
        if part := head_split(call.module).part:
            self._first_heads[site] = part * call.shape[1]
        for listener in self._listeners:
            listener(site, call, self._emit)

    def _site(self, call: AttentionCall) -> str:
        """Return the caller's name; shared layers are told apart by call number."""
        name = self._anatomy.names.get(id(call.module), "") if call.module else ""
        self._heard_sites.add(name)
        number = self._calls[name] = self._calls.get(name, -1) + 1
        return f"{name}#{number}" if number else name
