"""Benchmarks: `python -m bench schedule` and `python -m bench attend`; `--write` puts the tables into docs/bench.md."""
