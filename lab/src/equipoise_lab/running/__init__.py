"""Running experiments: one process, several, or a cluster."""
