"""Who brings the names of another library along gets what they are here, and every name in a message is one of ours."""

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard import (
    Alibi,
    Causal,
    Documents,
    KeyLengths,
    KVCache,
    Mask,
    MaskFunction,
    MultiHeadAttention,
    ProblemError,
    RegardError,
    Rope,
    Window,
    attend,
    attend_shared,
    attend_state,
    draw,
    explain,
)
from regard.cache import Contiguous, Paged, Rolling
from regard.describe.suggestions import KEYWORDS, MASKS, NAMES, SPECIAL, mask_for
from regard.linear import Elu1, linear_attend
from regard.nn import Decoder, Encoder, LatentAttention
from regard.rope import Yarn
from regard.scores import Dot

Q = torch.randn(1, 2, 5, 8)
OURS = set(inspect.signature(attend).parameters)
ANSWERING: list[Any] = [
    attend,
    attend_state,
    explain,
    attend_shared,
    linear_attend,
    KVCache.__init__,
    Decoder.generate,
    *(f for kind in (MultiHeadAttention, LatentAttention, Encoder, Decoder) for f in (kind.__init__, kind.forward)),
]
"""The functions that answer a keyword of another library."""
SPECS_OF_OTHERS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "Window": (Window, {"window_size": 4}, "^Window does not know window_size: say left="),
    "Rope": (Rope, {"head_dim": 16, "theta": 1e4}, "^Rope does not know head_dim: say dim=; nor theta: say base="),
    "Yarn": (Yarn, {"factor": 4.0, "original_max_position_embeddings": 3}, "say original="),
    "Documents": (Documents, {"document_ids": [0]}, "say ids="),
    "Alibi": (Alibi, {"num_heads": 3}, "say heads="),
}
LAYOUTS = (Contiguous, Paged, Rolling)
PARAMETERS = {
    name
    for function in [*ANSWERING, *(kind for kind, *_ in SPECS_OF_OTHERS.values()), KeyLengths, MaskFunction]
    for name in inspect.signature(function).parameters
}


@pytest.mark.parametrize("call", [attend, attend_state, explain])
def test_a_keyword_of_torch_is_answered_with_ours_and_with_the_drop_in(call: Any):
    says = rf"^{call.__name__} does not know is_causal: say mask=Causal\(\), .*regard.scaled_dot_product_attention\.$"
    with pytest.raises(TypeError, match=says) as caught:
        call(Q, Q, Q, is_causal=True)
    assert isinstance(caught.value, ProblemError)
    assert isinstance(caught.value, RegardError)


def test_every_keyword_is_answered_in_the_order_given():
    says = r"know attn_mask: say mask=TensorMask\(t\).*, bias=TensorBias.*; nor dropout_p: say dropout=; nor enable_gqa"
    call: Any = attend
    with pytest.raises(TypeError, match=says):
        call(Q, Q, Q, attn_mask=None, scale=1.0, dropout_p=0.0, enable_gqa=True)


def test_every_keyword_of_torchs_function_is_ours_or_is_answered():
    torchs = set(re.findall(r"(\w+)=", F.scaled_dot_product_attention.__doc__.split("->")[0]))  # pyright: ignore[reportOptionalMemberAccess]
    assert "is_causal" in torchs
    assert torchs - OURS <= set(KEYWORDS) | names_of(OURS)


def test_every_keyword_of_torchs_module_is_ours_or_is_answered():
    for ours, torchs in (
        (MultiHeadAttention.__init__, torch.nn.MultiheadAttention.__init__),
        (MultiHeadAttention.forward, torch.nn.MultiheadAttention.forward),
    ):
        known = set(inspect.signature(ours).parameters)
        assert set(inspect.signature(torchs).parameters) - known <= set(KEYWORDS) | names_of(known)


def names_of(known: set[str]) -> set[str]:
    """Names in other libraries of these parameters."""
    return {name for ours, names in NAMES.items() if ours in known for name in names}


def test_every_parameter_that_has_other_names_exists():
    assert set(NAMES) <= PARAMETERS


@pytest.mark.parametrize("function", ANSWERING, ids=lambda f: f.__qualname__)
def test_every_function_answers_a_keyword_that_it_does_not_have(function: Any):
    with pytest.raises(TypeError, match=r" does not know blue: expected one of ") as caught:
        function(blue=1)
    assert isinstance(caught.value, ProblemError)


def test_names_of_torchs_module_are_answered_with_ours():
    make: Any = MultiHeadAttention
    says = (
        r"^MultiHeadAttention does not know embed_dim: say d_model=; nor num_heads: say heads=; nor kdim: say "
        r"context_dim=; nor batch_first: leave it out: tensors are \[batch, tokens, d_model\]; .*from_torch"
    )
    with pytest.raises(TypeError, match=says):
        make(embed_dim=16, num_heads=2, kdim=8, batch_first=True)
    module: Any = MultiHeadAttention(16, 2)
    x = torch.randn(1, 5, 16)
    with pytest.raises(
        TypeError,
        match=r"^MultiHeadAttention.forward does not know query: say x=; nor key: say context=; nor need_weights: "
        r"weights are not kept, see regard.inspect.*; nor key_padding_mask: say mask=KeyLengths\(lengths\)",
    ):
        module(query=x, key=x, need_weights=False, key_padding_mask=None)


@pytest.mark.parametrize("name", SPECS_OF_OTHERS)
def test_a_field_of_a_mask_bias_or_position_is_answered(name: str):
    kind, keywords, says = SPECS_OF_OTHERS[name]
    with pytest.raises(TypeError, match=says) as caught:
        kind(**keywords)
    assert isinstance(caught.value, ProblemError)
    with pytest.raises(TypeError, match=rf"^{name} takes . arguments by position \(.*\), and got 9"):
        kind(*range(9))


def test_queries_keys_and_values_by_position_are_answered_with_the_arguments_of_the_module():
    module: Any = MultiHeadAttention(16, 2)
    x = torch.randn(1, 5, 16)
    says = (
        r"^MultiHeadAttention.forward takes 2 arguments by position \(x, context\), and got 3: say mask=, bias=, .* by "
        r"name. Queries are computed from x, keys and values from context, or from x without a context\.$"
    )
    with pytest.raises(TypeError, match=says) as caught:
        module(x, x, x)
    assert isinstance(caught.value, ProblemError)
    call: Any = attend
    with pytest.raises(TypeError, match=r"^attend takes 3 arguments by position \(q, k, v\), and got 4: say mask=, "):
        call(Q, Q, Q, Causal())


def test_queries_keys_and_values_by_the_names_of_torch_are_answered():
    call: Any = attend
    with pytest.raises(TypeError, match=r"^attend does not know query: say q=; nor key: say k=; nor value: say v=\.$"):
        call(query=Q, key=Q, value=Q)


def test_a_keyword_of_another_library_does_not_speak_of_torch():
    call: Any = attend
    with pytest.raises(
        TypeError, match=r"window_size: say mask=Causal\(\) & Window\(n\), which counts the query itself\.$"
    ):
        call(Q, Q, Q, window_size=(3, 0))


@pytest.mark.parametrize("name", ["window", "sliding_window", "window_size", "sinks"])
def test_a_window_of_a_cache_is_its_layout(name: str):
    make: Any = KVCache
    with pytest.raises(TypeError, match=rf"^KVCache does not know {name}: say layout=Rolling\(window, sinks=4\)"):
        make(**{name: 8})


ADVISED = {name for name in {*KEYWORDS, *(name for special in SPECIAL.values() for name in special)} if name != "self"}


@pytest.mark.parametrize("function", ANSWERING, ids=lambda f: f.__qualname__)
def test_advice_names_a_parameter_that_the_function_has(function: Any):
    known = set(inspect.signature(function).parameters)
    for name in ADVISED - known:
        with pytest.raises(TypeError) as caught:
            function(**{name: 1})
        advised = re.search(r": (?:say|give) (\w+)=", str(caught.value))
        assert advised is None or advised[1] in known, str(caught.value)


PACKED: dict[str, str] = {
    "cu_seqlens_q": r"say mask=Documents\(ids\), an id per token: torch.repeat_interleave",
    "max_seqlen_k": "leave it out: packed sequences are mask=Documents",
    "deterministic": "leave it out",
    "p": "say dropout=",
    "head_first": r"leave it out: tensors are always \[batch, heads, tokens, dim\]",
}


@pytest.mark.parametrize("name", PACKED)
def test_keywords_of_flash_attention_and_xformers_are_answered(name: str):
    call: Any = attend
    with pytest.raises(TypeError, match=rf"^attend does not know {name}: {PACKED[name]}"):
        call(Q, Q, Q, **{name: 1})


def test_linear_attention_has_no_mask():
    call: Any = linear_attend
    with pytest.raises(TypeError, match="does not know mask: linear attention has no masks, only causal="):
        call(Q, Q, Q, mask=Causal())
    with pytest.raises(TypeError, match=r"does not know is_causal: say causal=\.$"):
        call(Q, Q, Q, is_causal=True)


def test_a_slip_of_the_pen_is_answered_with_the_nearest_and_anything_else_with_all():
    call: Any = attend
    with pytest.raises(TypeError, match=r"know masc: say mask=, if that is meant\.$"):
        call(Q, Q, Q, masc=None)
    with pytest.raises(TypeError, match=r"know blue: expected one of q, k, v, mask, bias, .*, offset, backend\.$"):
        call(Q, Q, Q, blue=None)


def test_what_a_state_cannot_take_is_reported_of_it():
    call: Any = attend_state
    with pytest.raises(TypeError, match=r"attend_state does not know sink: .*with_sink"):
        call(Q, Q, Q, sink=torch.zeros(2))


def test_what_messages_propose_can_be_written():
    advices = [*KEYWORDS.values(), *(advice for special in SPECIAL.values() for advice in special.values())]
    parameters = {name for advice in advices for name in re.findall(r"\b(\w+)=", advice)}
    assert parameters >= {"mask", "bias", "softcap", "sink"}
    assert parameters <= PARAMETERS | {name for kind in LAYOUTS for name in inspect.signature(kind).parameters}
    names = {name for advice in advices for name in re.findall(r"\b([A-Z]\w+)\(", advice)}
    assert names
    assert all(hasattr(regard, name) or name in {kind.__name__ for kind in LAYOUTS} for name in names)


@pytest.mark.parametrize("here", MASKS)
def test_a_mask_that_is_given_is_a_mask(here: str):
    ids = torch.tensor([0, 0, 1, 1, 1])
    sizes = {"n": 3, "step": 2, "lengths": torch.tensor([4]), "ids": ids, "positions": ids[1:3], "size": 2}
    mask = eval(here, {**vars(regard), **sizes, "layout": torch.ones(3, 3, dtype=torch.bool), "parents": [-1, 0]})
    assert mask is None or isinstance(mask, Mask)
    assert attend(Q, Q, Q, mask=mask).shape == Q.shape


def test_a_mask_by_name_is_answered_however_it_is_written():
    assert mask_for("Sliding-Window") == mask_for("sliding attention") == mask_for("window") == "Causal() & Window(n)"
    assert mask_for("causal_mask") == mask_for("CAUSAL") == "Causal()"
    assert mask_for("full_attention") == "None"
    assert mask_for("causal, sinks and padding") == "Causal() & (Window(n) | Prefix(4)) & KeyLengths(lengths)"
    assert mask_for("causal+blue") is None


def test_a_mask_by_name_is_refused_by_attend_and_by_operators():
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


@pytest.mark.parametrize("value", ["blue", 3, {"causal": True}, b"causal"], ids=repr)
def test_what_has_no_elements_is_answered_with_the_masks_and_biases_that_there_are(value: Any):
    with pytest.raises(ProblemError, match=r"regard Mask; masks are Causal\(\), Window\(n\).* with & \| ~\.$"):
        attend(Q, Q, Q, mask=value)
    with pytest.raises(ProblemError, match=r"regard Bias; biases are Alibi\(heads\).* with \+\.$"):
        attend(Q, Q, Q, bias=value)
    with pytest.raises(ProblemError, match=r"^draw takes a mask, .*; masks are"):
        draw(value, 3, 3)


def test_the_name_of_a_mask_as_a_bias_is_answered_with_the_mask():
    with pytest.raises(ProblemError, match=r"; pass a mask as mask=Causal\(\) & Window\(n\)\.$"):
        attend(Q, Q, Q, bias="sliding_window")  # pyright: ignore[reportArgumentType, reportCallIssue]


BOOL, ADDED = torch.ones(5, 5, dtype=torch.bool), torch.zeros(5, 5)
CAUSAL: Any = Causal()
ALIBI: Any = Alibi(2)
OPERATORS: dict[str, tuple[Any, str]] = {
    "a tensor before a mask": (lambda: BOOL & CAUSAL, r"& takes a mask, .* bool tensor as TensorMask\(t\)"),
    "an array before a mask": (
        lambda: BOOL.numpy() | CAUSAL,
        r"\| takes .* array bool \[5, 5\].*\(torch.tensor\(t\)\)",
    ),
    "a function before a mask": (lambda: len & CAUSAL, r"the function len; wrap .* as MaskFunction\(f\)"),
    "nothing before a mask": (lambda: None & CAUSAL, "got None; leave None out"),
    "a class after a mask": (lambda: CAUSAL | Causal, r"the class Causal; did you mean Causal\(...\)\?$"),
    "a bias after a mask": (lambda: CAUSAL & ALIBI, r"got Alibi\(heads=2\), which is a bias; pass it as bias="),
    "a bias before a mask": (lambda: ALIBI & CAUSAL, r"Causal\(\), which is a mask: a bias .* passed as bias="),
    "a bias or a mask": (lambda: ALIBI | CAUSAL, r"^Alibi\(heads=2\) \| Causal\(\), which is a mask: a bias adds"),
    "masks added": (lambda: CAUSAL + CAUSAL, r"masks combine with & \| ~"),
    "a mask added to a tensor": (lambda: ADDED + CAUSAL, r"masks combine with & \| ~"),
    "masks subtracted": (lambda: CAUSAL - CAUSAL, "a & ~b"),
    "a mask subtracted from a number": (lambda: 1 - CAUSAL, r"^1 - Causal\(\): to keep what a mask does not, ~mask"),
    "a negative mask": (lambda: -CAUSAL, r"^-\(Causal\(\)\): .* ~mask"),
    "masks multiplied": (lambda: CAUSAL * CAUSAL, "both masks keep, a & b"),
    "a mask multiplied by a tensor": (lambda: ADDED * CAUSAL, r"float32 .* \* Causal\(\): .* both masks keep, a & b"),
    "one of two masks": (lambda: CAUSAL ^ CAUSAL, r"^Causal\(\) \^ Causal\(\).*: .*\(a \| b\) & ~\(a & b\)"),
    "a number or a mask": (lambda: 1 ^ CAUSAL, r"^1 \^ Causal\(\): "),
    "a mask added to a bias": (lambda: ALIBI + CAUSAL, "which is a mask; pass it as mask="),
    "a tensor added to a bias": (lambda: ALIBI + ADDED, r"wrap a tensor .* as TensorBias\(t\)"),
    "a bias added to a tensor": (lambda: ADDED + ALIBI, r"wrap a tensor .* as TensorBias\(t\)"),
    "a number and a bias": (lambda: 2 & ALIBI, r"^2 & Alibi\(heads=2\): a bias adds .* passed as bias="),
    "a number or a bias": (lambda: 2 | ALIBI, r"^2 \| Alibi\(heads=2\): a bias adds .* passed as bias="),
    "a bias inverted": (lambda: ~ALIBI, r"^~\(Alibi\(heads=2\)\): a bias adds .* passed as bias="),
    "a bias multiplied": (lambda: ALIBI * 2, r"^Alibi\(heads=2\) \* 2: .* scale its tensors, such as Alibi\(slopes="),
    "a number times a bias": (lambda: 2 * ALIBI, r"^2 \* Alibi\(heads=2\): .* scale its tensors"),
    "a tensor times a bias": (lambda: ADDED * ALIBI, r"float32 .* \* Alibi\(heads=2\): .* scale its tensors"),
    "a bias divided": (lambda: ALIBI / 2, r"^Alibi\(heads=2\) / 2: .* scale its tensors"),
    "a bias less another": (lambda: ALIBI - ALIBI, r"^Alibi\(heads=2\) - Alibi\(heads=2\).*: .* scale its tensors"),
    "a number less a bias": (lambda: 2 - ALIBI, r"^2 - Alibi\(heads=2\): .* scale its tensors"),
    "a negative bias": (lambda: -ALIBI, r"^-\(Alibi\(heads=2\)\): .* scale its tensors"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operands_that_do_not_combine_are_answered_with_what_to_write(name: str):
    combine, says = OPERATORS[name]
    with pytest.raises(ProblemError, match=says):
        combine()


SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "a function": ({"mask": lambda b, h, q, k: q >= k}, r"mask is the function <lambda>: .* MaskFunction\(f\)\.$"),
    "a list": ({"mask": [[True]]}, r"mask is \[\[True\]\]: expected .*TensorMask\(torch.tensor\(t\)\)"),
    "masks in a list": (
        {"mask": [Causal(), Window(3)]},
        r"combine masks with &: Causal\(\) & Window\(left=3\)\.$",
    ),
    "biases in a list": (
        {"bias": [Alibi(2), Alibi(2)]},
        r"add biases with \+: Alibi\(heads=2\) \+ Alibi\(heads=2\)\.$",
    ),
    "biases in a list as a mask": ({"mask": (Alibi(2),)}, r"add biases with \+: bias=Alibi\(heads=2\)\.$"),
    "masks in a list as a bias": (
        {"bias": [Causal(), Window(3)]},
        r"combine masks with &: mask=Causal\(\) & Window\(left=3\)\.$",
    ),
    "two masks by name": (
        {"mask": "causal+window"},
        r"the text 'causal\+window': .*combine masks with &: say mask=Causal\(\) & Window\(n\)\.$",
    ),
    "a bias as a mask": ({"mask": Alibi(2)}, r"mask is Alibi\(heads=2\), which is a bias: .*; pass it as bias=\.$"),
    "a mask as a bias": ({"bias": Causal() & Causal()}, "which is a mask: .*; pass it as mask="),
    "a switch": ({"mask": True}, r"mask is True: .*; say mask=Causal\(\), or None"),
    "a bool tensor as a bias": ({"bias": BOOL}, r"mask=TensorMask\(t\)"),
    "a function as a bias": ({"bias": lambda b, h, q, k: q - k}, "subclass regard.extend.Bias"),
    "a class that is no mask": ({"mask": SimpleNamespace(keep=len)}, "subclass regard.extend.Mask, with @spec"),
    "a class that is no bias": ({"bias": SimpleNamespace(value=len)}, "subclass regard.extend.Bias, with @spec"),
    "a module": ({"mask": nn.Linear(2, 2)}, "mask is a Linear: "),
    "a position as a bias": ({"bias": Rope(8)}, r"MultiHeadAttention\(position=\)"),
}


@pytest.mark.parametrize("kind", [Causal, Dot, Elu1])
def test_what_has_no_arguments_says_so(kind: Any):
    with pytest.raises(TypeError, match=rf"^{kind.__name__} takes no arguments, and got 1\.$"):
        kind(3)
    with pytest.raises(TypeError, match=rf"^{kind.__name__} does not know size: expected no arguments\.$"):
        kind(size=3)
    assert str(inspect.signature(kind)) == "() -> None"


@pytest.mark.parametrize("name", SPECS)
def test_what_is_no_spec_of_its_kind_is_answered_with_what_to_write(name: str):
    arguments, says = SPECS[name]
    with pytest.raises(ProblemError, match=says):
        attend(Q, Q, Q, **arguments)
