"""``python -m lab.benchmarks.lipschitz``."""

from lab.benchmarks.lipschitz import main

main()
