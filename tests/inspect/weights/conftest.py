"""Calls of many kinds, to be read in every way."""

import pytest

from tests.inspect.dense import CASES


@pytest.fixture(params=CASES)
def call(request):
    return CASES[request.param]()
