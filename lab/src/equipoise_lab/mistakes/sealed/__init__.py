"""Cases written without sight of the checks, opened once at the end.

Until then they are run unwatched only: whoever writes a check does not read them.
"""
