"""Second derivatives of attention and feed-forward nets, and bounds on them."""
