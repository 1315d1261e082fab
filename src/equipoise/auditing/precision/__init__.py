"""Low precision on somebody's model: measured, predicted, and where to stop it."""
