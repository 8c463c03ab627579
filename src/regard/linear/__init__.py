"""Linear (kernel) attention, whose state is a matrix: `linear_attend`, its rules and its state. See README.md."""

from regard.describe.feature import Elu1, Favor, Feature, FeatureError, Relu, Taylor
from regard.linear.attend import linear_attend
from regard.linear.rule import Decay, Delta, Gated, Rule, retnet_decay
from regard.linear.state import LinearResult, LinearState

__all__ = [
    "Decay",
    "Delta",
    "Elu1",
    "Favor",
    "Feature",
    "FeatureError",
    "Gated",
    "LinearResult",
    "LinearState",
    "Relu",
    "Rule",
    "Taylor",
    "linear_attend",
    "retnet_decay",
]
