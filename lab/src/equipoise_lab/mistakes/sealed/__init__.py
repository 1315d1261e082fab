"""Cases that those who write checks do not read until the figures are taken.

Written without sight of the checks. ``lab/benchmarks/mistakes.py --sealed`` runs
them, prints counts only, and appends a line to ``sealed/log.jsonl`` with the revision,
so that it can be seen how often they were looked at.
"""
