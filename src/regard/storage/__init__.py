"""Stored keys and values: codecs, and handles of what a cache keeps in pages and codes."""
