"""Cases written without sight of the checks, opened once at the end.

Until then they are run unwatched only, and authors of checks do not read them.
"""
