"""The laboratory of Equipoise: experiments, claims of four papers, failing runs.

It watches, judges and reports with the instrument, through documented modules only
(``lab/tests/test_layers.py`` lists them).
"""

__version__ = "0.2.0"
