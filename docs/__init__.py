"""Documentation, some of it generated: see ``docs.generate``."""
