"""What runs a call: the plan cache, the choice of a backend, and the operator that torch traces."""
