"""Reports of runs for people: pure view-models, and renderers that add nothing."""
