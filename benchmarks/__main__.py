"""``./dev bench [NAME …]``: run the named benchmarks, or list them."""

import importlib
import pkgutil
import sys

import benchmarks

NOT_BENCHMARKS = {"fragility_subjects", "paired", "table", "__main__"}


def names() -> list[str]:
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(set(found) - NOT_BENCHMARKS)


def main(wanted: list[str]) -> int:
    unknown = set(wanted) - {"all", *names()}
    if unknown or not wanted:
        print("usage: ./dev bench all | NAME …\n  " + "\n  ".join(names()))
        return 2 if unknown else 0
    for name in names() if "all" in wanted else wanted:
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
