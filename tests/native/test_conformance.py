"""Every instruction set, on every case of the table and in every type, is what the formula says."""

import pytest
import torch

from regard import attend_state
from tests.conformance import CASES, computes_the_formula, dot_products
from tests.native.engines import ALL, PLAIN
from tests.oracle import dense, worst


@pytest.mark.representative
@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("engine", [*ALL, PLAIN])
@pytest.mark.parametrize("name", dot_products())
def test_an_instruction_set_computes_the_formula(name: str, engine: str, dtype: torch.dtype):
    computes_the_formula(name, dtype, engine)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("engine", [*ALL, PLAIN])
@pytest.mark.parametrize("name", dot_products())
def test_its_log_sum_exp_is_without_the_sink(name: str, engine: str):
    case = CASES[name]()
    words = {word: value for word, value in case.words.items() if word != "sink"}
    found = attend_state(case.q, case.k, case.v, **words, backend=engine).lse
    assert worst(found, dense(case)[1]) < 2e-6 * 10
