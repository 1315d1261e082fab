"""Models of every family, tiny and untrained, to be read against a dense reference."""
