"""Looking inside attention: what heads look at, exactly, and without a matrix of n x n. See the README beside this.

    observe, Weights, sweep                what one call looked at
    survey, measure, Measure, MEASURES     measures of every head of a model
    write_page, framed                     a report as an HTML page
    ablated, ablation_effects ...          interventions, the main ones of `regard.inspect.intervene`

Single measures are functions of `regard.inspect.measures`.
"""

from regard.inspect.intervene import (
    Mean,
    Resample,
    ablated,
    ablation_effects,
    gradient_attention,
    importance,
    integrated,
    mean_outputs,
    next_token_loss,
    prune_curve,
    rollout,
)
from regard.inspect.measures.catalogue import MEASURES
from regard.inspect.measures.measure import Inputs, Measure
from regard.inspect.measures.score import HeadScores
from regard.inspect.observing.observe import observe
from regard.inspect.observing.recorded import read_calls
from regard.inspect.page import framed, write_page
from regard.inspect.surveying.measure import Measured, measure
from regard.inspect.surveying.report import Report
from regard.inspect.surveying.survey import survey
from regard.inspect.sweep import sweep
from regard.inspect.weights.lazy import Weights

__all__ = [
    "MEASURES",
    "HeadScores",
    "Inputs",
    "Mean",
    "Measure",
    "Measured",
    "Report",
    "Resample",
    "Weights",
    "ablated",
    "ablation_effects",
    "framed",
    "gradient_attention",
    "importance",
    "integrated",
    "mean_outputs",
    "measure",
    "next_token_loss",
    "observe",
    "prune_curve",
    "read_calls",
    "rollout",
    "survey",
    "sweep",
    "write_page",
]
