"""The papers, made executable: each published claim is a function with a verdict."""
