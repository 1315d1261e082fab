"""Verdicts on a model as it stands: precision, curvature and selection."""
