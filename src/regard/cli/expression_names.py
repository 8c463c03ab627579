"""The names in a text of masks and biases, checked without torch; `expression` then makes the masks and biases."""

import ast

from regard.describe.suggestions import mask_for
from regard.errors import ProblemError

MASKS = ("Causal", "Window", "Prefix", "KeyLengths", "Documents", "Global", "Dilated", "Blocks", "Tree", "TensorMask")
BIASES = ("Alibi", "T5Bias", "TensorBias")
"""Classes that `expression` reads. A test compares the two."""


def check_names(text: str | None) -> None:
    """Raise `ProblemError` for a name in the text that is no mask and no bias. Other errors are left to `expression`.

    >>> check_names("Causal() & Window(512)")
    >>> check_names("causal")
    Traceback (most recent call last):
    regard.errors.ProblemError: causal is not understood: expected Causal().
    """
    try:
        nodes = list(ast.walk(ast.parse((text or "").strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    called = [id(node.func) for node in nodes if isinstance(node, ast.Call)]
    for node in nodes:
        if isinstance(node, ast.Name) and (node.id not in MASKS + BIASES or id(node) not in called):
            raise ProblemError(unknown(node.id))


def unknown(name: str) -> str:
    """The message for a name that is no mask or bias, or has no parentheses."""
    if name in MASKS + BIASES:
        return f"{name} is not understood: expected {name}() with its parentheses."
    if near := next((known for known in MASKS + BIASES if known.lower() == name.lower()), None):
        return f"{name} is not understood: expected {near}{'()' if near == 'Causal' else '(...)'}."
    if mask := mask_for(name):
        return f"{name} is not understood: expected {mask}."
    can = f"{', '.join(MASKS)} for a mask; {', '.join(BIASES)} for a bias"
    if name == "MaskFunction":
        return f"{name} takes a function, which only Python can express. Expected one of {can}."
    return f"{name} is not understood: expected one of {can}."
