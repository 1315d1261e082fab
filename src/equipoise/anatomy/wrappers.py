"""Module names as the user wrote them, whatever wraps the model today."""

from collections.abc import Iterator

from torch import nn

# Wrapper class → the attribute that holds the user's module. By name: torch.compile,
# DDP and FSDP need not be imported to be recognised.
WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "LoraModel": "model",
}
PEFT = "PeftModel"  # PeftModelForCausalLM and its like


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's own module under any number of wrappers."""
    while (attribute := _held_as(type(module).__name__)) is not None:
        module = getattr(module, attribute)
    return module


def _held_as(wrapper: str) -> str | None:
    return "base_model" if wrapper.startswith(PEFT) else WRAPPERS.get(wrapper)


def named(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield ``named_modules()`` with the wrappers' own names left out.

    Example:
        >>> wrapped = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
        >>> [name for name, _ in named(wrapped)]
        ['', '0']
    """
    yield from _named(unwrapped(model), prefix, set())


def _named(
    module: nn.Module, prefix: str, seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module.named_children():
        yield from _named(unwrapped(child), f"{prefix}.{name}".lstrip("."), seen)
