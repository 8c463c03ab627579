"""Who brings the names of another library along is told what they are here, and every name told is one of ours."""

import inspect
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import regard
from regard import Causal, Mask, ProblemError, RegardError, attend, attend_state, explain
from regard.describe.suggestions import KEYWORDS, MASKS, mask_for

Q = torch.randn(1, 2, 5, 8)
OURS = set(inspect.signature(attend).parameters)


@pytest.mark.parametrize("call", [attend, attend_state, explain])
def test_a_keyword_of_torch_is_answered_with_ours_and_with_the_drop_in(call: Any):
    says = rf"^{call.__name__} does not know is_causal: say mask=Causal\(\), .*regard.scaled_dot_product_attention\.$"
    with pytest.raises(TypeError, match=says) as caught:
        call(Q, Q, Q, is_causal=True)
    assert isinstance(caught.value, ProblemError)
    assert isinstance(caught.value, RegardError)


def test_every_keyword_is_answered_in_the_order_given():
    says = r"know attn_mask: say mask=TensorMask\(t\).*, bias=TensorBias.*; nor dropout_p: say dropout=; nor enable_gqa"
    with pytest.raises(TypeError, match=says):
        attend(Q, Q, Q, attn_mask=None, scale=1.0, dropout_p=0.0, enable_gqa=True)


def test_every_keyword_of_torchs_function_is_ours_or_is_answered():
    torchs = set(re.findall(r"(\w+)=", F.scaled_dot_product_attention.__doc__.split("->")[0]))  # pyright: ignore[reportOptionalMemberAccess]
    assert "is_causal" in torchs
    assert torchs - OURS <= set(KEYWORDS)


def test_a_keyword_of_another_library_does_not_speak_of_torch():
    with pytest.raises(
        TypeError, match=r"window_size: say mask=Causal\(\) & Window\(n\), which counts the query itself\.$"
    ):
        attend(Q, Q, Q, window_size=(3, 0))


def test_a_slip_of_the_pen_is_answered_with_the_nearest_and_anything_else_with_all():
    with pytest.raises(TypeError, match=r"know masc: say mask=, if that is meant\.$"):
        attend(Q, Q, Q, masc=None)
    with pytest.raises(TypeError, match=r"know blue: expected one of mask, bias, .*, offset, backend\.$"):
        attend_state(Q, Q, Q, blue=None)


def test_what_a_state_cannot_take_is_said_of_it():
    with pytest.raises(TypeError, match=r"attend_state does not know sink: .*with_sink"):
        attend_state(Q, Q, Q, sink=torch.zeros(2))


def test_what_is_said_to_say_can_be_said():
    told = {name for advice in KEYWORDS.values() for name in re.findall(r"\b(\w+)=", advice)}
    assert told >= {"mask", "bias", "scale", "softcap", "sink", "dropout"}
    assert told <= OURS
    words = {name for advice in KEYWORDS.values() for name in re.findall(r"\b([A-Z]\w+)\(", advice)}
    assert words
    assert all(hasattr(regard, name) for name in words)


@pytest.mark.parametrize("here", MASKS)
def test_a_mask_that_is_told_is_a_mask(here: str):
    ids = torch.tensor([0, 0, 1, 1, 1])
    sizes = {"n": 3, "step": 2, "lengths": torch.tensor([4]), "ids": ids, "positions": ids[1:3], "size": 2}
    mask = eval(here, {**vars(regard), **sizes, "layout": torch.ones(3, 3, dtype=torch.bool), "parents": [-1, 0]})
    assert mask is None or isinstance(mask, Mask)
    assert attend(Q, Q, Q, mask=mask).shape == Q.shape


def test_a_mask_by_name_is_answered_however_it_is_written():
    assert mask_for("Sliding-Window") == mask_for("sliding attention") == mask_for("window") == "Causal() & Window(n)"
    assert mask_for("causal_mask") == mask_for("CAUSAL") == "Causal()"
    assert mask_for("full_attention") == "None"


def test_a_mask_by_name_is_told_by_attend_and_by_the_signs_that_combine():
    with pytest.raises(
        ProblemError, match=r"mask is the text 'causal': expected a regard Mask; say mask=Causal\(\)\.$"
    ):
        attend(Q, Q, Q, mask="causal")
    with pytest.raises(ProblemError, match=r"say mask=Causal\(\) & Window\(3\)\.$"):
        attend(Q, Q, Q, mask="Causal() & Window(3)")
    with pytest.raises(
        ProblemError, match=r"& takes a mask, and got the text 'window'; say Causal\(\) & Window\(n\)\.$"
    ):
        Causal() & "window"  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]


def test_a_name_that_nobody_has_is_told_as_any_thing_that_is_no_mask():
    with pytest.raises(ProblemError, match="mask is 'blue': expected a regard Mask; wrap a bool tensor"):
        attend(Q, Q, Q, mask="blue")
