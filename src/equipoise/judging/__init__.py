"""The rules, the forecast and the verdict of a run, from its readings alone."""
