"""What runs a call: the plan cache, the choice of an engine, and the operator that torch traces."""
