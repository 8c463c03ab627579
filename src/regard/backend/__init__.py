"""The backends: one file each, the only place where that backend is named. `contract.py` says what a backend is."""
