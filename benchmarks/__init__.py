"""The project's own benchmarks: `./bench` for attention and its goals, `python -m benchmarks.schedules` for schedules.

`regard bench` measures whatever shapes one has; both use `regard.bench`.
"""
