"""Experiments: models, data, a trainer, recipes and a runner."""
