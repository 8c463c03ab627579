"""Looking inside attention: what heads look at, exactly, and without a matrix of n x n. See the README beside this."""

from regard.inspect.measures import (
    Breadth,
    Score,
    breadth,
    induction,
    offset_score,
    previous_token,
    sink,
)
from regard.inspect.observe import Look, Seen, observe
from regard.inspect.page import write_page
from regard.inspect.report import DEFINITIONS, Definition, Head, Picture, Report, Run
from regard.inspect.stimulus import Repeats
from regard.inspect.survey import survey
from regard.inspect.weights import Weights

__all__ = [
    "DEFINITIONS",
    "Breadth",
    "Definition",
    "Head",
    "Look",
    "Picture",
    "Repeats",
    "Report",
    "Run",
    "Score",
    "Seen",
    "Weights",
    "breadth",
    "induction",
    "observe",
    "offset_score",
    "previous_token",
    "sink",
    "survey",
    "write_page",
]
