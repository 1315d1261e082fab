"""Facts of a sampled step on their way to the host: JSON values, some still tensors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


class PendingFacts:
    """Sections of facts; tensors in them travel with the sample's one transfer."""

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self._sections: dict[str, Any] = dict(sections)
        self._numbers: Iterator[tuple[float, ...]] | None = None

    def waiting(self) -> list[Tensor]:
        """Return the tensors that are still on their device."""
        return list(_tensors(self._sections))

    def arrived(self, numbers: Sequence[tuple[float, ...]]) -> None:
        """Take the numbers of all that was ``waiting``."""
        self._sections = _with_numbers(self._sections, iter(numbers))

    @property
    def sections(self) -> dict[str, Any]:
        """The facts as JSON values, once everything has arrived."""
        assert not self.waiting(), "facts are asked for before they have arrived"
        return self._sections


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _with_numbers(value: Any, numbers: Iterator[tuple[float, ...]]) -> Any:
    """Return the value with a number, or a list, in the place of each tensor."""
    if isinstance(value, Tensor):
        found = next(numbers)
        return found[0] if value.ndim == 0 else list(found)
    if isinstance(value, Mapping):
        return {key: _with_numbers(item, numbers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_numbers(item, numbers) for item in value]
    return value
