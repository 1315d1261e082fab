"""Audits of a model: what low precision, curvature and attention heads do in it."""

MODEL_FORMS = (
    "a Hugging Face model directory, FILE.py:FUNCTION or package.module:FUNCTION "
    "(the function returns a model, or a model and a batch)"
)
"""What a user may type for a model. Here, because ``--help`` shows it without torch."""
