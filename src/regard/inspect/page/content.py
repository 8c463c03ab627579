"""What the script reads: scores, tokens, and captions of what is packed, with the meaning of every number."""

from dataclasses import asdict
from typing import Any

from regard.inspect.page.budget import Fitted
from regard.inspect.surveying.report import Head, Report
from regard.inspect.surveying.sinks import SinkShare, spans

OWN = ("sure", "remarkable")
"""Numbers of a head that are no scores, but that the page can colour and order by all the same."""


def content(report: Report, fit: Fitted, other: tuple[Report, Fitted] | None) -> dict[str, Any]:
    """The report as the script reads it. The report that it is compared with says only what differs."""
    told = _told(report, fit)
    if other is not None:
        told["other"] = _told(*other)
        told["other"]["tokens"] = None if other[0].tokens == report.tokens else other[0].tokens
    told["definitions"] = _meanings(told["measures"], report)
    return told


def _meanings(measures: list[str], report: Report) -> dict[str, Any]:
    """The definitions of what this report has, with its rules."""
    known = report.to_dict()["definitions"]
    of_all = ("kind", "sink_shares") if report.sink_shares else ("kind",)
    return {key: known[key] for key in (*of_all, *measures) if key in known}


def _told(report: Report, fit: Fitted) -> dict[str, Any]:
    measures = report.measures
    return {
        "run": asdict(report.run),
        "tokens": report.tokens,
        "prompt_tokens": report.prompt_tokens,
        "measures": [*(m for m in measures if m not in OWN), *(m for m in OWN if _has(report, m))],
        "heads": [_head(report, head, measures) for head in report.heads],
        "causal": fit.causal,
        "pictures": [{"id": block.id, "by": block.by, "pictures": block.pictures} for block in fit.pictures],
        "closes": [close.caption for close in fit.closes],
        "left_out": {"closes": fit.closes_left_out, "largest": fit.largest_left_out},
        "sinks": [_sinks(share) for share in report.sink_shares],
        "ablations": _ablations(report),
    }


def _has(report: Report, own: str) -> bool:
    return any(getattr(head, own) is not None for head in report.heads)


def _head(report: Report, head: Head, measures: tuple[str, ...]) -> dict[str, Any]:
    """Scores are [value, chance, low, high], without the Nones at the end; of measures that the head was put to."""
    return {
        "layer": head.layer,
        "head": head.head,
        "kv_head": head.kv_head,
        "kind": head.kind,
        "scores": {measure: _trimmed(head.scores[measure]) for measure in measures if measure in head.scores}
        | {own: [getattr(head, own)] for own in OWN if getattr(head, own) is not None},
        "distances": report.profiles.get((head.layer, head.head)),
    }


def _trimmed(numbers: tuple[float | None, ...]) -> list[float | None]:
    kept = list(numbers)
    while kept and kept[-1] is None:
        kept.pop()
    return kept


def _sinks(share: SinkShare) -> dict[str, Any]:
    return {"above": share.threshold, "share": share.share, "layers": spans(share.most), "value": share.value}


def _ablations(report: Report) -> dict[str, Any] | None:
    """How heads were taken out. What that cost stands among the scores of each head."""
    if report.ablations is None:
        return None
    told = asdict(report.ablations)
    del told["deltas"]
    return told
