"""What a run says to a person: pure view-models, and renderers that add nothing."""
