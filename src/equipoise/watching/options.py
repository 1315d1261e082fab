"""What a user may choose when watching, validated when it is said."""

from dataclasses import dataclass

from equipoise.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How often to look, and how hard."""

    every: int = 10
    """Sample one step in this many, counted from the first."""
    strict: bool = False
    """Let an exception of ours reach the training loop. For tests, not for training."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"every={self.every}: sample every 1, 2, … steps")
