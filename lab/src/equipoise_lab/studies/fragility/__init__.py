"""Baek's three experiments on numerical fragility, with null predictors."""
