"""One step: its states, what is measured in it, and the file it is written to."""
