"""The words: plain values that say what attention is wanted. Nothing is computed here."""
