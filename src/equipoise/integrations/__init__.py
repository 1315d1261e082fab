"""Integrations: HF Trainer, Lightning, and training scripts run unmodified."""
