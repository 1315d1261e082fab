"""A benchmark of mistakes in training programs, and of correct programs like them.

Each mistake is a program that trains, with a twin that differs in nothing but the
mistake, and the code of the finding that must name it. The codes were declared, in
``relations.toml``, before anything looked for them. Half of the cases (``sealed``) are
written by people who do not write the checks, and are not read by those who do until
the figures are taken.
"""
