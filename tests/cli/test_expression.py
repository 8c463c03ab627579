"""Words on the command line: what is understood, and how everything else is refused."""

import pytest
import torch

import regard
from regard import (
    Alibi,
    Blocks,
    Causal,
    Dilated,
    Documents,
    Global,
    KeyLengths,
    Prefix,
    ProblemError,
    TensorBias,
    TensorMask,
    Tree,
    Window,
)
from regard.cli import expression
from regard.describe.mask import Mask


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Causal()", Causal()),
        ("  Causal() & Window(512)\n", Causal() & Window(512)),
        ("Causal() & (Window(left=512) | Prefix(4))", Causal() & (Window(512) | Prefix(4))),
        ("~Causal() | Window(None, 3)", ~Causal() | Window(None, 3)),
        ("Global([1, 5]) & Dilated(2)", Global([1, 5]) & Dilated(2)),
        ("Tree([-1, 0, 0, 1])", Tree([-1, 0, 0, 1])),
    ],
)
def test_a_mask_is_read_as_python_would(text, word):
    assert expression.mask(text) == word


@pytest.mark.parametrize(
    ("text", "kind", "field", "tensor"),
    [
        ("KeyLengths([3, 7])", KeyLengths, "lengths", torch.tensor([3, 7])),
        ("Prefix([3, 7])", Prefix, "size", torch.tensor([3, 7])),
        ("Documents([0] * 3 + [1] * 2)", Documents, "ids", torch.tensor([0, 0, 0, 1, 1])),
        ("TensorMask([[1, 0], [True, 1]])", TensorMask, "mask", torch.tensor([[True, False], [True, True]])),
        ("Blocks([[1, 0], [True, 1]], size=4)", Blocks, "layout", torch.tensor([[True, False], [True, True]])),
    ],
)
def test_lists_become_the_tensors_of_specs(text, kind, field, tensor):
    found = expression.mask(text)
    assert isinstance(found, kind)
    assert torch.equal(getattr(found, field), tensor)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Documents([0.2, 0.7])", r"^a list of Documents has 0.2: expected whole numbers\.$"),
        ("KeyLengths([2.7, 3])", "has 2.7: expected whole numbers"),
        ("KeyLengths([3, True])", "has True: expected whole numbers"),
        ("Prefix([2.9])", "has 2.9: expected whole numbers"),
        ("Documents([[0, 1], [0, None]])", "has None: expected whole numbers"),
        ("TensorMask([[0.5, -3]])", "has 0.5: expected True, False, 1 or 0"),
        ("TensorMask([[1, -3]])", "has -3: expected True, False, 1 or 0"),
        ("Blocks([[0.3, 1]], 4)", "has 0.3: expected True, False, 1 or 0"),
        ("Alibi([1, True])", "has True: expected numbers"),
    ],
)
def test_a_list_is_converted_to_no_other_type(text, says):
    read = expression.bias if "Alibi" in text else expression.mask
    with pytest.raises(ProblemError, match=says):
        read(text)


def test_an_argument_by_name_is_given_once():
    with pytest.raises(
        ProblemError, match=r"^'Window\(left=3, left=4\)' has left= more than once: expected it once\.$"
    ):
        expression.mask("Window(left=3, left=4)")


def test_a_bias_is_read_as_well():
    assert expression.bias("Alibi(8)") == Alibi(8)
    assert expression.bias("Alibi(8) + Alibi(8)") == Alibi(8) + Alibi(8)


def test_a_bias_may_be_a_table():
    found = expression.bias("TensorBias([[0, -1.5]])")
    assert isinstance(found, TensorBias)
    assert torch.equal(found.tensor, torch.tensor([[0.0, -1.5]]))


def test_a_spec_that_cannot_be_written_here_names_those_that_can():
    for text in ("MaskFunction(lambda b, h, q, k: q > k)", "MaskFunction", "Stripes(3)"):
        with pytest.raises(ProblemError) as refused:
            expression.mask(text)
        message = str(refused.value)
        assert (
            "Causal, Window, Prefix, KeyLengths, Documents, Global, Dilated, Blocks, Tree, TensorMask for a mask"
            in message
        )
        assert "Alibi, T5Bias, TensorBias for a bias" in message
        assert ("takes a function" in message) == text.startswith("MaskFunction")


def test_every_spec_of_the_library_is_understood_or_refused_as_for_python_alone():
    every = {name for name in dir(regard) if isinstance(word := getattr(regard, name), type) and issubclass(word, Mask)}
    assert every - {"Mask"} == {word.__name__ for word in expression.MASKS} | {"MaskFunction"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Causal",
        "Causal(",
        "causal()",
        "Causal(3)",
        "Causal() and Window(3)",
        "Causal() & 3",
        "Causal() + Window(3)",
        "Window()",
        "Window(0)",
        "Window('3')",
        "Window(left=2, **{})",
        "Window(*[1])",
        "Window(3.5 + 1)",
        "KeyLengths([3, None])",
        "KeyLengths([[1], [2, 3]])",
        "Blocks([1], -1)",
        "Documents([0] * 10 ** 9)",
        "Documents([0] * 100000000)",
        "Documents([0] * -1 * [1])",
        "-Causal()",
        "~3",
        "3",
        "[1, 2]",
        "Alibi(8)",
        "MaskFunction(lambda b, h, q, k: q > k)",
        "__import__('os').system('true')",
        "Causal().__class__",
        "(lambda: Causal())()",
        "Causal() if True else Causal()",
        "Causal()\x00",
        "(" * 10_000,
        "~" * 10_000 + "Causal()",
        "1" * 5_000,
    ],
)
def test_everything_else_is_refused_in_words(text):
    with pytest.raises(ProblemError) as refused:
        expression.mask(text)
    assert len(str(refused.value)) < 400
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("causal", r"^causal is not understood: expected Causal\(\)\.$"),
        ("Causal() & window(4)", r"^window is not understood: expected Window\(...\)\.$"),
        ("sliding_window", r"expected Causal\(\) & Window\(n\)\.$"),
        ("Blue()", "^Blue is not understood: expected one of Causal, Window, "),
    ],
)
def test_a_name_in_lower_case_or_of_another_library_is_answered_with_the_mask(text, says):
    with pytest.raises(ProblemError, match=says):
        expression.mask(text)
