"""Every class that ``transformers`` can build small from its configuration alone."""
