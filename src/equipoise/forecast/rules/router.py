"""Routers of mixtures of experts: collapsed onto few experts."""

from equipoise.forecast.history import History, by_site
from equipoise.forecast.rules.registry import Measured, measured, rule


@rule(
    "router.collapsed",
    reads="router.load",
    above=0.4,
    release=0.25,
    persist=3,
    scope="layer",
    applies="models with a router",
    source="theory: balance is 1/E each; our calibration: python -m benchmarks.rules",
    message="the router {site} has collapsed: {count} of {experts} experts get less "
    "than a tenth of their share",
    remedies=("router_balance", "learning_rate"),
)
def collapsed(history: History) -> Measured | None:
    """Largest share over routers of experts with less than 0.1/E of the load."""
    reading = history.last("router.load")
    if reading is None:
        return None
    starved = {
        site: sum(load < 0.1 * sum(row) / len(row) for load in row) / len(row)
        for site, row in by_site(reading)
        if row
    }
    if not starved:
        return None
    site = max(starved, key=lambda name: starved[name])
    experts = len(dict(by_site(reading))[site])
    count = round(starved[site] * experts)
    return measured(starved[site], site, count=count, experts=experts)


@rule(
    "router.certain",
    reads="router.entropy",
    below=0.02,
    release=0.05,
    persist=5,
    scope="layer",
    applies="models with a router",
    severity="info",
    source="theory: a router without entropy learns nothing more",
    message="the router {site} is certain of every token: entropy {value:.2g} nats",
    remedies=("router_balance",),
)
def certain(history: History) -> Measured | None:
    """Smallest mean entropy of a router."""
    reading = history.last("router.entropy")
    if reading is None or not reading.sites:
        return None
    site, row = min(by_site(reading), key=lambda pair: pair[1][0])
    return measured(row[0], site)
