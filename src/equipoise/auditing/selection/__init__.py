"""Which heads of a model select, and which have gone flat."""

from equipoise.auditing.selection.study import SelectionRow, SelectionStudy, study

# Their old names, for one more release.
Row, Study = SelectionRow, SelectionStudy

__all__ = ["Row", "SelectionRow", "SelectionStudy", "Study", "study"]
