"""Commands of the laboratory; ``equipoise`` finds them by its entry points."""
