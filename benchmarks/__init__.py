"""Ratios, truth trials and soaks: each file prints a table and writes JSON."""
