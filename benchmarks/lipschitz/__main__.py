"""``python -m benchmarks.lipschitz``."""

from benchmarks.lipschitz import main

main()
