"""Attention calls observed while a model runs: `regard.inspect.observe`, in `observe.py`.

`regard.observe_calls` is the hook of the library: a function that is called with each `Call` of `attend`. This package
builds on it for whole models: it names the layer and the module of each call, offers its weights, and records calls
in memory or on disk.

| file | content |
|---|---|
| `observe.py` | `observe`, and `Look`, one call as it passes |
| `layers.py` | which layer and module a call belongs to |
| `recorded.py` | `RecordedCall`, and copies of calls in memory |
| `disk.py` | calls in safetensors files |
"""
