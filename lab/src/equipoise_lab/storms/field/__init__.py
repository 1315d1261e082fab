"""The field: small runs of many kinds, to judge rules on that were tuned on none.

A unit is one run: an architecture, a task, optimisers, a schedule, and perhaps a fault
that starts at a random step, beside a healthy twin. The open part is for work. The
locked part has kinds of its own, and is opened once.
"""
