"""A small model to survey, and its tokenizer."""

import pytest

from tests.inspect.small import llama, words


@pytest.fixture(scope="module")
def tokenizer():
    return words()


@pytest.fixture(name="llama")
def fresh_llama():
    return llama()
