"""Stored keys and values: layouts, codecs, and handles to pages and codes."""
