"""`./bench programs`: whole programs with and without regard."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks import programs
from benchmarks.programs_cases import Case, gpt
from regard.bench.rounds import Effort


def test_a_program_is_measured_forward_and_training():
    case = Case("a small one", None, lambda: gpt(1, 160, 128, 1))
    found = list(programs.lines(case, [torch.float32], Effort(seconds=0.0, least=1)))
    assert [line.step for line in found] == ["forward", "training step"]
    assert all(line.ratio > 0 and line.limit > 0 and line.error < 1e-4 for line in found)


def test_without_attention_every_argument_gets_a_gradient_and_nothing_is_computed():
    q, k = torch.randn(2, 4, 9, 8, requires_grad=True), torch.randn(2, 2, 5, 8, requires_grad=True)
    with programs.without_attention():
        out = F.scaled_dot_product_attention(q, k, k * 2, enable_gqa=True)
    torch.testing.assert_close(out, q + 3 * k.mean(2, keepdim=True).repeat_interleave(2, 1))
    out.sum().backward()
    assert q.grad is not None
    assert k.grad is not None


@pytest.mark.exhaustive
def test_the_table_is_printed_and_unknown_names_are_refused(capsys):
    assert programs.main(["--cases", "2 x 10", "--dtype", "float32", "--seconds", "0.01", "--threads", "1"]) == 0
    assert "| nn.TransformerEncoder, 2 x 10 tokens | float32 | forward |" in capsys.readouterr().out
    assert programs.main(["--cases", "nothing"]) == 2
    assert "no program has 'nothing' in its name" in capsys.readouterr().err
