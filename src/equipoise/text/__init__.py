"""Words: the only place that makes sentences of findings and verdicts. No torch."""
