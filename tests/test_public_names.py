"""Public names that are imported when they are first used are listed before, too."""

from importlib import import_module

import pytest

import regard


@pytest.mark.parametrize("room", ["cost", "integrate", "parallel"])
def test_the_names_of_a_room_are_listed_and_a_misspelt_one_is_answered(room: str):
    module = import_module(f"regard.{room}")
    assert dir(module) == sorted(module.__all__)
    with pytest.raises(AttributeError, match=f"module 'regard.{room}' has no attribute 'nothing'"):
        _ = module.nothing


def test_rooms_are_listed_beside_the_names_of_the_package():
    listed = dir(regard)
    assert {"attend", "cache", "cost", "evaluate", "inspect", "integrate", "parallel"} <= set(listed)
    assert all(hasattr(regard, name) for name in listed)
