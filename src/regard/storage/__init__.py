"""Stored keys and values: layouts, codecs, and handles to pages and codes.

```
codec.py     quantisation of keys and values to 8 or 4 bits, and back
hadamard.py  the rotation of channels that spreads large ones over all of them
stored.py    the layouts of a KV cache, and the handle of its stored keys and values
```
"""
