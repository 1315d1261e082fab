"""Which heads of a model select, and which have gone flat."""

from equipoise.auditing.selection.study import SelectionRow, SelectionStudy, study

Row, Study = (
    SelectionRow,
    SelectionStudy,
)  # their old names, for one more release

__all__ = ["Row", "SelectionRow", "SelectionStudy", "Study", "study"]
