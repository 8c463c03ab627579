"""What the script of the page reads: scores, tokens, captions and definitions, as JSON."""

import json
import math
from dataclasses import asdict
from typing import Any

from regard.inspect.names import head_text
from regard.inspect.page.packing import Fit
from regard.inspect.surveying.kinds import Head
from regard.inspect.surveying.report import Report
from regard.inspect.surveying.sinks import SinkShare, spans

HEAD_VALUES = ("sure", "remarkable")
"""Values of a head that are no scores, by which the page can colour and order heads as well."""


def content(report: Report, fit: Fit, other: tuple[Report, Fit] | None) -> dict[str, Any]:
    """The report as the script reads it; the report that it is compared with leaves out equal tokens."""
    data = _report_data(report, fit)
    if other is not None:
        data["other"] = _report_data(*other)
        data["other"]["tokens"] = None if other[0].tokens == report.tokens else other[0].tokens
    data["definitions"] = _definitions(data["measures"], report)
    return data


def _definitions(measures: list[str], report: Report) -> dict[str, Any]:
    """The definitions of the measures of this report, and of the rules."""
    known = report.to_dict()["definitions"]
    of_all = ("kind", "sink_shares") if report.sink_shares else ("kind",)
    return {key: known[key] for key in (*of_all, *measures) if key in known}


def _report_data(report: Report, fit: Fit) -> dict[str, Any]:
    measures = report.measures
    own = [name for name in HEAD_VALUES if any(getattr(head, name) is not None for head in report.heads)]
    return {
        "run": asdict(report.run),
        "tokens": report.tokens,
        "prompt_tokens": report.prompt_tokens,
        "measures": [*(m for m in measures if m not in HEAD_VALUES), *own],
        "heads": [_head(report, head, measures) for head in report.heads],
        "causal": fit.causal,
        "pictures": [{"id": block.id, "by": block.by, "pictures": block.pictures} for block in fit.pictures],
        "close_ups": [close.caption for close in fit.close_ups],
        "left_out": {"close_ups": fit.close_ups_left_out, "largest": fit.largest_left_out},
        "missing_close_ups": {head_text(place): reason for place, reason in report.missing_close_ups.items()},
        "sinks": [_sinks(share) for share in report.sink_shares],
        "ablations": _ablations(report),
    }


def _head(report: Report, head: Head, measures: tuple[str, ...]) -> dict[str, Any]:
    """Scores are [value, chance, low, high], without trailing Nones; only measures that the head has."""
    return {
        "layer": head.layer,
        "head": head.head,
        "kv_head": head.kv_head,
        "kind": head.kind,
        "scores": {measure: _trim(head.scores[measure]) for measure in measures if measure in head.scores}
        | {own: [getattr(head, own)] for own in HEAD_VALUES if getattr(head, own) is not None},
        "distances": report.profiles.get((head.layer, head.head)),
    }


def _trim(values: tuple[float | None, ...]) -> list[float | None]:
    trimmed = list(values)
    while trimmed and trimmed[-1] is None:
        trimmed.pop()
    return trimmed


def _sinks(share: SinkShare) -> dict[str, Any]:
    return {"above": share.threshold, "share": share.share, "layers": spans(share.most), "value": share.value}


def _ablations(report: Report) -> dict[str, Any] | None:
    """How heads were ablated. The change of the loss is among the scores of each head."""
    if report.ablations is None:
        return None
    data = asdict(report.ablations)
    del data["deltas"]
    return data


def as_json(value: Any) -> str:
    r"""JSON that is safe inside a `<script>`: ASCII, without `<`, `>` and `&`; NaN and infinities are null.

    >>> print(as_json({"token": "</script>", "score": float("nan")}))
    {"token":"\u003c/script\u003e","score":null}
    """
    text = json.dumps(finite(value, digits=6), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def finite(value: Any, digits: int | None = None) -> Any:
    """The value with None for NaN and infinities, which JSON lacks, and floats of `digits` digits (None: all).

    >>> finite({"scores": (1 / 3, float("inf"))}, digits=3)
    {'scores': [0.333, None]}
    """
    match value:
        case dict():
            return {str(key): finite(item, digits) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list() | tuple():
            return [finite(item, digits) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case float():
            return None if not math.isfinite(value) else value if digits is None else float(f"{value:.{digits}g}")
        case _:
            return value
