"""Descriptions of attention as plain values: masks, biases, scores, positions, heads. No attention is computed here."""
