"""The project's own benchmarks: `./bench` for attention and its goals, `python -m benchmarks.schedules` for schedules.

`regard bench` measures whatever shapes one has; what both do stands in `regard.bench`.
"""
