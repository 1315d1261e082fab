"""One question each: its recipe, its measurement and what was found, side by side."""
