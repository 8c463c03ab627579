"""Results as one HTML page without anything from outside: settings, tables, pictures, and each example."""

import json
from collections.abc import Sequence
from html import escape

from regard import __version__
from regard.evaluate.picture import picture
from regard.evaluate.results import Results

STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .25rem .7rem; border-bottom: 1px solid #ddd }
td { text-align: right; font-variant-numeric: tabular-nums } td:first-child { text-align: left }
svg { max-width: 100%; width: 44rem } .examples td { text-align: left; font: 12px/1.4 monospace }
.wrong { color: #b00 } summary { cursor: pointer }
"""
SHOWN = 500
"""Examples on the page, at most."""


def page(runs: Sequence[tuple[str, Results]]) -> str:
    """The page of one or more runs of a task."""
    first = runs[0][1]
    title = f"{first.task}: {first.settings['model']}"
    parts = [f"<h1>{escape(title)}</h1>", picture(runs).strip()]
    for name, results in runs:
        parts += [f"<h2>{escape(name)}</h2>"] * bool(name)
        parts += [_table(results.rows()), _settings(results), _examples(results)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="regard">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}"
        f"<p>regard {escape(__version__)}. Intervals are of 95 %: Wilson's for right answers, the bootstrap over texts "
        "for losses.</p></body></html>\n"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><tr>{head}</tr>{body}</table>"


def _settings(results: Results) -> str:
    found = {**results.settings, **results.about, "examples": len(results.records)}
    return _table([("setting", "value"), *((key, json.dumps(value)) for key, value in found.items())])


def _examples(results: Results) -> str:
    if results.is_loss:
        return ""
    lines = [
        f'<tr class="{"" if record["score"] == 1 else "wrong"}"><td>{escape(record["example"])}</td>'
        f"<td>{record['score']:.2g}</td><td>{escape(record['text'][:200])}</td></tr>"
        for record in results.records[:SHOWN]
    ]
    more = f"<p>{len(results.records) - SHOWN:,} more are in the file.</p>" if len(results.records) > SHOWN else ""
    return (
        f'<details><summary>what the model wrote</summary><table class="examples"><tr><th>example</th><th>score</th>'
        f"<th>text</th></tr>{''.join(lines)}</table>{more}</details>"
    )
