"""Interventions: what a model does without a head, or with other weights. See the README beside this."""

from regard.inspect.intervene.ablate import ablated, ablation_effects, effect_order, greedy
from regard.inspect.intervene.adversary import Adversary, adversary
from regard.inspect.intervene.blocks import VARIANTS, Variant
from regard.inspect.intervene.heads import Site, edit_outputs, heads_of
from regard.inspect.intervene.importance import Importance, importance
from regard.inspect.intervene.integrated import Integrated, integrated
from regard.inspect.intervene.loss import Effect, Interval, next_token_loss
from regard.inspect.intervene.permute import Permuted, permuted
from regard.inspect.intervene.prune import PruneCurve, prune_curve
from regard.inspect.intervene.rank_collapse import RankCollapse, Stack, random_rank_collapse, rank_collapse, residual
from regard.inspect.intervene.relevance import Relevance, gradient_attention, rollout
from regard.inspect.intervene.replacement import Mean, Resample, Zero, mean_outputs, outputs_of
from regard.inspect.intervene.value_zeroing import ValueZeroing, value_zeroing
from regard.inspect.names import HeadName

__all__ = [
    "VARIANTS",
    "Adversary",
    "Effect",
    "HeadName",
    "Importance",
    "Integrated",
    "Interval",
    "Mean",
    "Permuted",
    "PruneCurve",
    "RankCollapse",
    "Relevance",
    "Resample",
    "Site",
    "Stack",
    "ValueZeroing",
    "Variant",
    "Zero",
    "ablated",
    "ablation_effects",
    "adversary",
    "edit_outputs",
    "effect_order",
    "gradient_attention",
    "greedy",
    "heads_of",
    "importance",
    "integrated",
    "mean_outputs",
    "next_token_loss",
    "outputs_of",
    "permuted",
    "prune_curve",
    "random_rank_collapse",
    "rank_collapse",
    "residual",
    "rollout",
    "value_zeroing",
]
