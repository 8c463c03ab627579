"""What `MultiHeadAttention` adds to its parts: the same projections and `attend`, written out, beside the module.

`./bench modules` prints the table. Times are the processor time of one thread, so that others on the
machine count little; both are measured in every round, in turns, and the median of the rounds' ratios is taken.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import command
from benchmarks.report import table
from regard import Causal, attend
from regard.bench.rounds import Effort, Measure, interleaved, on_threads
from regard.describe.position import Rope
from regard.nn import MultiHeadAttention

D_MODEL, HEADS = 512, 8
TOKENS = (1, 128, 512, 2048)
LONG_ENOUGH = 0.02
"""Seconds that a measurement lasts at least: the clock of processor time may tick in milliseconds."""

CASES: dict[str, dict[str, Any]] = {
    "MHA": {},
    "GQA, 2 key heads": {"kv_heads": 2},
    "MHA, Rope": {"position": Rope(D_MODEL // HEADS)},
    "MHA, gate": {"gate": True},
    "GQA, QK-norm, Rope, gate": {
        "kv_heads": 2, "qk_norm": True, "position": Rope(D_MODEL // HEADS), "gate": True,
    },
}  # fmt: skip


class Line(NamedTuple):
    """Seconds of the parts and of the module, and the module's over the parts'."""

    parts: float
    module: float
    ratio: float


def parts_of(m: MultiHeadAttention) -> Callable[[Tensor], Tensor]:
    """What the module does, written out with its weights: no module is called and nothing is decided."""
    q_proj, k_proj, v_proj, o_proj = (one.weight for one in (m.q_proj, m.k_proj, m.v_proj, m.o_proj))
    gate = None if m.gate_proj is None else m.gate_proj.weight
    norms = None if m.q_norm is None or m.k_norm is None else (m.q_norm.weight, m.k_norm.weight)
    rope = None if m.position is None else m.position.spec
    mask, dim = Causal(), m.head_dim

    def run(x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, weight).unflatten(2, (-1, dim)) for weight in (q_proj, k_proj, v_proj))
        if norms is not None:
            q, k = F.rms_norm(q, (dim,), norms[0], 1e-6), F.rms_norm(k, (dim,), norms[1], 1e-6)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if isinstance(rope, Rope):
            q, k = rope.rotate(q), rope.rotate(k)
        out = attend(q, k, v, mask=mask).transpose(1, 2).flatten(2)
        return F.linear(out if gate is None else out * torch.sigmoid(F.linear(x, gate)), o_proj)

    return run


def measured(run: Callable[[], object]) -> Measure:
    """The processor time of one call in seconds, by as many calls as last long enough. It is called here to warm up."""
    run()
    calls = max(1, math.ceil(LONG_ENOUGH / max(_seconds(run, 1), 1e-6)))
    return lambda: _seconds(run, calls)


def _seconds(run: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - start) / calls


def compare(words: dict[str, Any], tokens: int, backward: bool, effort: Effort) -> Line:
    """One case of a line, forward without gradients or forward and backward."""
    module = MultiHeadAttention(D_MODEL, HEADS, mask=Causal(), **words)
    x = torch.randn(1, tokens, D_MODEL, requires_grad=backward)
    runs = {"parts": parts_of(module), "module": module}
    assert torch.equal(runs["parts"](x), runs["module"](x))

    def of(run: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        def both() -> object:
            return run(x).sum().backward()

        def forward() -> object:
            with torch.no_grad():
                return run(x)

        return both if backward else forward

    return _line({name: measured(of(run)) for name, run in runs.items()}, effort)


def _line(measures: dict[str, Measure], effort: Effort) -> Line:
    rounds = interleaved(measures, effort)
    parts, module = (rounds.median(lambda one: one, name) for name in ("parts", "module"))
    ratio = rounds.median(lambda parts, module: module / parts, "parts", "module")
    assert parts is not None
    assert module is not None
    assert ratio is not None
    return Line(parts, module, ratio)


def run(effort: Effort) -> str:
    """The table, in Markdown."""
    rows: list[tuple[str, ...]] = []
    with on_threads(1):
        for name, words in CASES.items():
            for tokens in TOKENS:
                for backward in (False, True):
                    line = compare(words, tokens, backward, effort)
                    passes = "forward, backward" if backward else "forward"
                    numbers = (f"{1e3 * line.parts:.2f}", f"{1e3 * line.module:.2f}", f"{line.ratio:.3f}")
                    rows.append((name, f"{tokens:,}", passes, *numbers))
                    print(" | ".join(rows[-1]), flush=True)
    return table(
        ("causal, fp32, batch 1, d_model 512, 8 heads", "tokens", "pass", "parts, ms", "module, ms", "ratio"), rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, show, arguments)


def _parser() -> argparse.ArgumentParser:
    return command.parser("modules", (__doc__ or "").split("\n", maxsplit=1)[0], seconds=2.0, threads=False)


def show(args: argparse.Namespace) -> int:
    """Measure, and print the table."""
    print(run(Effort(seconds=args.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
