"""What attention costs: arithmetic over a problem and its schedule. Nothing is run."""
