"""How exact gradients in half precision are where keys and values have a mean, beside the formula in PyTorch.

`python -m benchmarks.half_gradients` prints the errors of dq, dk and dv by their sizes, in percent. Means are in
spreads: of keys and of values, with a random sign for each dimension. The truth is the formula in float64.
"""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.report import machine, table
from regard import Causal, attend

DIM = 64
MEANS = (0, 0), (4, 0), (0, 4), (1, 1), (4, 4)
"""Of keys and of values."""

CASES = (1024, True), (4096, True), (1024, False)
"""Tokens, and whether the mask is causal."""


def errors(call: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor, truth: list[Tensor]) -> str:
    """The errors of the three gradients by their sizes."""
    found = gradients(call, leaves, dout)
    each = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
    return ", ".join(f"{100 * error:.2f}" for error in each)


def gradients(call: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Those of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    return list(torch.autograd.grad(call(*leaves), leaves, dout))


def rows(tokens: int, causal: bool, dtype: torch.dtype) -> Iterator[list[str]]:
    """A row for each pair of means."""
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * DIM**-0.5
        return torch.softmax(scores.masked_fill(hidden, -torch.inf) if causal else scores, dim=3) @ v

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=Causal() if causal else None, backend="native")

    for of_keys, of_values in MEANS:
        g = torch.Generator().manual_seed(0)
        signs = torch.randn(2, DIM, generator=g).sign()
        q, k, v, dout = (torch.randn(1, 2, tokens, DIM, generator=g) for _ in range(4))
        leaves = [t.to(dtype) for t in (q, k + of_keys * signs[0], v + of_values * signs[1])]
        truth = gradients(formula, [t.double() for t in leaves], dout.to(dtype).double())
        known = f"{tokens:,}", "causal" if causal else "dense", str(dtype)[6:], str(of_keys), str(of_values)
        yield [*known, errors(ours, leaves, dout.to(dtype), truth), errors(formula, leaves, dout.to(dtype), truth)]


def main() -> int:
    """Print the table."""
    title = ["tokens", "mask", "type", "mean of keys", "of values", "regard: dq, dk, dv, %", "PyTorch: dq, dk, dv, %"]
    found = [row for tokens, causal in CASES for row in rows(tokens, causal, torch.bfloat16)]
    found += rows(*CASES[0], torch.float16)
    print(machine())
    print(table(title, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
