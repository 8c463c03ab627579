"""The engines: one file each, the only place where that engine is named. `contract.py` says what an engine is."""
