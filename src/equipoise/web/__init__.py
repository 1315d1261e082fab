"""The board: a local web page of live and finished runs. Read-only, without torch."""
