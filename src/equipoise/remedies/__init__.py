"""Changes to somebody's model that can be taken back."""
