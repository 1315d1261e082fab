"""How many heads a module says it has."""

from torch import nn

HEAD_COUNTS = (
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead"),
    *("num_attn_heads", "attention_heads", "n_attn_heads", "nheads", "h"),
)


def count(module: nn.Module | None, names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes a module or its config has, if any."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
