"""Which heads of a model select, and which have gone flat."""

from equipoise.auditing.selection.study import Row, Study, study

__all__ = ["Row", "Study", "study"]
