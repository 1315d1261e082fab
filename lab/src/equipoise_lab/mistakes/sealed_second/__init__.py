"""A second half, written without sight of the checks after the first was opened.

Until it is opened its programs run unwatched only, and authors of checks do not read
them. It shows program styles that the first half does not: see ``models``.
"""
