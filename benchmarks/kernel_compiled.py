"""The fused kernel compiled for GPUs that need not be here: code, registers, memory.

``./dev bench kernel_compiled`` for all; for one
``python -m benchmarks.kernel_compiled cuda:80``.
"""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.table import publish

TARGETS = {"A100": "cuda:80", "H100": "cuda:90", "MI300X": "hip:gfx942"}
POINTERS = {
    **dict.fromkeys(("q_at", "k_at"), "*bf16"),
    **dict.fromkeys(("mask_at", "slopes_at", "out_at"), "*fp32"),
    "sees_at": "*i32",
    "chosen_at": "*i64",
    **dict.fromkeys(("scale", "cap"), "fp32"),
}


def compiled(target: str, *, rows: int = 16, width: int = 64) -> dict[str, Any]:
    """Return what a compiler makes of the kernel for one target."""
    import triton
    from triton.backends.compiler import GPUTarget

    from equipoise.numerics.rows.triton_kernel import attention_rows
    from equipoise.numerics.rows.triton_rows import constants

    fixed = {
        **constants(rows, width, 0),
        **dict.fromkeys(("CAPPED", "ALIBI", "CHOSEN", "WIDEN"), False),
    }
    names = attention_rows.arg_names
    signature = {
        name: "constexpr" if name in fixed else POINTERS.get(name, "i32")
        for name in names
    }
    constant = {(names.index(name),): value for name, value in fixed.items()}
    kind, arch = target.split(":")
    gpu = GPUTarget(
        kind, int(arch) if kind == "cuda" else arch, 32 + 32 * (kind == "hip")
    )
    source = triton.compiler.ASTSource(
        attention_rows, signature=signature, constexprs=constant
    )
    made = triton.compile(source, target=gpu)
    code = made.asm.get("cubin") or made.asm["hsaco"]
    found = {"target": target, "bytes": len(code), "shared": made.metadata.shared}
    text = made.asm.get("amdgcn", "")
    for name in ("vgpr_count", "vgpr_spill_count"):
        if hit := re.search(rf"\.{name}:\s*(\d+)", text):
            found[name] = int(hit[1])
    return found


def find_triton() -> None:
    """Put triton on the path where ``./dev`` installed it, unless it is there."""
    if find_spec("triton") is None:
        sys.path.insert(0, str(Path(sys.prefix) / "triton"))


def main() -> None:
    find_triton()
    rows = [{"gpu": gpu, **compiled(target)} for gpu, target in TARGETS.items()]
    publish("kernel_compiled", rows)


if __name__ == "__main__":
    find_triton()
    print(json.dumps(compiled(sys.argv[1]))) if sys.argv[1:] else main()
