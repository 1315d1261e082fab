"""What the watch reports, as data: each finding's code and parameters are chosen here.

Their words are templates of ``text/findings.toml``, by code. Codes under
``watch.unread`` end in the reason that a probe, or the interception, gave.
"""

from collections.abc import Sequence

from equipoise.anatomy.sites import Reason
from equipoise.records import Finding, Scalar, Severity

SILENT, UNREAD = "watch.silent", "watch.unread"
NO_PASS = f"{SILENT}.no_pass"
NO_LOSS = f"{SILENT}.no_loss"
NO_STEP = f"{SILENT}.no_step"
UNREAD_MIXERS = f"{UNREAD}.mixers"
LATE_OPTIMIZER = f"{UNREAD}.late_optimizer"
OTHER_BATCHES = f"{UNREAD}.other_batches"
OTHER_OPTIMIZER = "watch.optimizer"
MODULES_CHANGED = "watch.modules"
PARTIAL_LOSS = {
    "no scalar": f"{UNREAD}.loss_not_scalar",
    "replaced": f"{UNREAD}.gradients_replaced",
}
RANK_LOST = "watch.rank_lost"
RANKS_APART = "watch.ranks_apart"
PROBE_FAILED = "probe.failed"

NO_ATTENTION = Reason("no_attention")
"""Of the model as a whole, in which no attention call was seen."""


def not_read(
    step: int,
    sites: Sequence[str],
    why: Reason,
    *,
    missing: bool,
    share: float | None = None,
) -> Finding:
    """Return that sites are not read, or not in full: one finding for one reason.

    ``share`` is how much of the parameters they hold, where that is known.
    """
    return Finding(
        step=step,
        severity="warn" if missing else "info",
        code=f"{UNREAD}.{why.code}",
        site=sites[0],
        params={"sites": len(sites), **_params(why), **_share(share)},
    )


def silent(step: int, code: str, severity: Severity = "warn") -> Finding:
    """Return that a part of the loop was not seen: a pass, a loss, the step's end."""
    return Finding(step=step, severity=severity, code=code)


def silent_sites(
    step: int, sites: Sequence[str], declared: int, why: Reason, share: float | None
) -> Finding:
    """Return that declared sites ran, and no attention call was seen in them."""
    names = ", ".join(sites[:3])
    counts = {"count": len(sites), "declared": declared}
    code = f"{SILENT}.sites"
    more = {"names": names, **counts, **_params(why), **_share(share)}
    return Finding(step=step, severity="warn", code=code, site=sites[0], params=more)


def _share(share: float | None) -> dict[str, Scalar]:
    return {} if share is None else {"share": share}


def _params(why: Reason) -> dict[str, Scalar]:
    params = {"why": why.code, "kernel": why.kernel, "detail": why.detail}
    return {name: value for name, value in params.items() if value}


def rank_lost(step: int, rank: int, ranks: int) -> Finding:
    """Return that the other ranks ended without closing their run."""
    return Finding.warn(step, RANK_LOST, case="not_closed", rank=rank, ranks=ranks)


def not_exchanged(step: int, rank: int, ranks: int, error: Exception) -> Finding:
    """Return that the exchange of a step failed."""
    why = {"case": "not_exchanged", "error": type(error).__name__}
    return Finding.warn(step, RANK_LOST, rank=rank, ranks=ranks, **why)


def not_shared(step: int, rank: int, ranks: int) -> Finding:
    """Return that a sample had not been exchanged when the training ended."""
    return Finding.warn(step, RANK_LOST, case="not_shared", rank=rank, ranks=ranks)


def at_other_steps(step: int, steps: str) -> Finding:
    """Return that the ranks do not count alike; ``steps`` names each rank's."""
    return Finding.warn(step, RANK_LOST, case="other_steps", steps=steps)


def batches_left_out(step: int, cleared: str) -> Finding:
    """Return that some ranks left out batches that others did not."""
    return Finding.warn(step, RANKS_APART, cleared=cleared)


def interval_changed(
    step: int, *, interval: int, every: int, cost: float, plain: float, budget: float
) -> Finding:
    """Return that samples are further apart from here on, or nearer."""
    times = {"cost": cost, "plain": plain, "ratio": cost / plain, "budget": budget}
    return Finding.info(step, "watch.budget", interval=interval, every=every, **times)


def probe_failed(step: int, probe: str, error: BaseException) -> Finding:
    """Return that a probe of ours failed and is off.

    Its name is in the code: two that fail in one step are two findings on every rank.
    """
    code = f"{PROBE_FAILED}.{probe}"
    return Finding.warn(step, code, probe=probe, error=repr(error))
