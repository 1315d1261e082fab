"""Other people's training loops: HF Trainer, Lightning, and scripts as they are."""
