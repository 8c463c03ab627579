"""How `regard.everywhere` is turned on and off: in blocks, for good, by Ctrl-C, beside what programs put there."""

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import regard
from regard import ProblemError, native
from regard.override import switch
from tests.override.of_torch import OF_TORCH, of_size, qkv

pytestmark = pytest.mark.skipif(not native.available(), reason="without the compiled library torch runs every call")

FUSED = "_transformer_encoder_layer_fwd"


def test_it_is_off_outside_and_for_good_until_it_is_turned_off():
    before = getattr(torch, FUSED)
    with regard.everywhere():
        assert switch.is_on()
        with regard.everywhere(False):
            assert not switch.is_on()
        assert switch.is_on()
    assert not switch.is_on()
    assert getattr(torch, FUSED) is before
    regard.everywhere()
    with regard.everywhere():
        pass
    assert switch.is_on()
    regard.everywhere(False)
    assert not switch.is_on()
    assert "regard" not in torch.compiler.config.cache_key_tag


@pytest.mark.parametrize("for_good", [False, True])
def test_blocks_that_were_made_before_others_were_entered_leave_what_was_on(for_good: bool):
    regard.everywhere(for_good)
    first, second = regard.everywhere(not for_good), regard.everywhere(not for_good)
    for block in (first, second):
        block.__enter__()
    assert switch.is_on() is not for_good
    for block in (first, second):
        block.__exit__(None, None, None)
    assert switch.is_on() is for_good


def test_a_block_that_is_entered_takes_back_nothing_that_was_called_since():
    block = regard.everywhere(False)
    regard.everywhere()
    with block:
        assert not switch.is_on()
    assert switch.is_on()


def test_calls_without_an_end_are_not_kept():
    for n in range(19):
        regard.everywhere(n % 2 == 0)
    assert len(switch._process.requests) == 1
    with regard.everywhere(False):
        pass
    assert switch.is_on()


def test_leaving_a_block_that_was_not_entered_is_an_error_and_changes_nothing():
    with pytest.raises(ProblemError, match="left and was not entered"):
        regard.everywhere().__exit__(None, None, None)
    reporting = regard.everywhere(report=True)
    with pytest.raises(ProblemError, match="left and was not entered"):
        reporting.__exit__(None, None, None)
    assert reporting in switch._process.printing
    with reporting:
        pass
    regard.everywhere(False)
    with regard.everywhere() as block:
        assert switch.is_on()
    with block:
        assert switch.is_on()
    assert not switch.is_on()


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("entered", [True, False], ids=["entering", "calling"])
def test_ctrl_c_on_the_way_in_leaves_what_was_on(monkeypatch: pytest.MonkeyPatch, on: bool, entered: bool):
    block = regard.everywhere(on) if entered else None
    regard.everywhere(not on)
    interrupt(monkeypatch, switch, "_replace")
    with pytest.raises(KeyboardInterrupt):
        regard.everywhere(on) if block is None else block.__enter__()
    assert switch.is_on() is not on
    regard.everywhere(on)
    assert switch.is_on() is on
    regard.everywhere(False)
    assert not switch.is_on()
    assert F.scaled_dot_product_attention is OF_TORCH


@pytest.mark.parametrize("place", ["leave", "_replace"])
@pytest.mark.parametrize("printing", [False, True])
def test_ctrl_c_on_the_way_out_turns_it_off(monkeypatch: pytest.MonkeyPatch, printing: bool, place: str):
    block = regard.everywhere(report=printing)
    with pytest.raises(KeyboardInterrupt), block:
        interrupt(monkeypatch, switch if place == "_replace" else switch._process, place)
    switch.atexit.unregister(block._show)
    assert not switch.is_on()
    assert not switch._process.blocks
    assert not switch._process.printing
    assert F.scaled_dot_product_attention is OF_TORCH


def test_ctrl_c_on_the_way_out_of_an_inner_block_leaves_the_outer_one_on(monkeypatch: pytest.MonkeyPatch):
    with regard.everywhere() as block:
        with pytest.raises(KeyboardInterrupt), block:
            interrupt(monkeypatch, switch._process, "leave")
        assert switch.is_on()
    assert not switch.is_on()


@pytest.mark.parametrize("place", ["listen", "register", "withdraw"])
def test_ctrl_c_while_a_block_is_made_or_entered_leaves_it_off(monkeypatch: pytest.MonkeyPatch, place: str):
    owners = {"listen": switch.report, "register": switch.atexit, "withdraw": switch._process}
    interrupt(monkeypatch, owners[place], place)
    with pytest.raises(KeyboardInterrupt), regard.everywhere(report=place == "register"):
        pass
    assert not switch.is_on()
    assert not switch._process.printing
    assert F.scaled_dot_product_attention is OF_TORCH


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Press Ctrl-C at the end of the next call of a function."""
    function, interruptions = getattr(owner, name), [KeyboardInterrupt()]

    def interrupted(*arguments: Any, **options: Any) -> None:
        function(*arguments, **options)
        if interruptions:
            raise interruptions.pop()

    monkeypatch.setattr(owner, name, interrupted)


def test_blocks_of_several_threads_may_overlap():
    inside, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with regard.everywhere():
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=other)
    with regard.everywhere():
        thread.start()
        inside.wait()
    assert switch.is_on()
    go_on.set()
    thread.join()
    assert not switch.is_on()


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """Replaces a function of torch, as a program may; the calls are noted."""

    def patch(name: str) -> list[int]:
        calls, replaced = list[int](), getattr(F, name)

        def own(query: Tensor, *arguments: Any, **options: Any) -> Any:
            calls.append(query.shape[-2])
            return replaced(query, *arguments, **options)

        monkeypatch.setattr(F, name, own)
        return calls

    return patch


@pytest.mark.parametrize("inside", [False, True])
def test_a_function_that_a_program_put_in_the_place_of_torchs_stays(inside: bool, patched: Any):
    q, k, v = qkv()
    with regard.everywhere() if inside else nullcontext():
        calls = patched("scaled_dot_product_attention")
    own = F.scaled_dot_product_attention
    with regard.everywhere() as caught:
        assert F.scaled_dot_product_attention is own
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q.as_subclass(type("Own", (Tensor,), {})), k, v)
        assert F.scaled_dot_product_attention is own
    assert F.scaled_dot_product_attention is own
    assert calls == [256, 256]
    assert any(row.form.why is None for row in caught.rows)


def test_a_program_that_replaced_torchs_function_before_regard_was_imported_keeps_its_own():
    program = (
        "import torch, torch.nn.functional as F\n"
        "replaced, calls = F.scaled_dot_product_attention, []\n"
        "def scaled_dot_product_attention(*arguments):\n    calls.append(1)\n    return replaced(*arguments)\n"
        "F.scaled_dot_product_attention = scaled_dot_product_attention\n"
        "import regard\n"
        "q = torch.ones(1, 2, 8, 8)\n"
        "with regard.everywhere():\n    F.scaled_dot_product_attention(q, q, q)\n"
        "print(len(calls), F.scaled_dot_product_attention is scaled_dot_product_attention)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "True"]


def test_a_forward_of_multi_head_attention_that_a_program_put_there_stays(patched: Any):
    calls, layer, x = patched("multi_head_attention_forward"), nn.MultiheadAttention(8, 2), of_size(5, 1, 8)
    own = F.multi_head_attention_forward
    with regard.everywhere(report=True):
        layer(x, x, x)
    assert F.multi_head_attention_forward is own
    assert len(calls) == 1


def test_wrong_arguments_are_refused():
    with pytest.raises(ProblemError, match="on is 'yes': expected True or False"):
        regard.everywhere("yes")


def test_everywhere_can_be_turned_off_inside_of_an_overridden_call():
    class Off(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            regard.everywhere(False)
            return func(*args, **(kwargs or {}))

    regard.everywhere()
    with Off():
        F.scaled_dot_product_attention(*qkv())
    assert F.scaled_dot_product_attention is OF_TORCH


def test_a_model_in_the_place_of_a_switch_is_named_by_its_class():
    with pytest.raises(ProblemError, match=r"^on is a Linear: expected True or False\.$"):
        regard.everywhere(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
