"""The limits of the machine at hand, measured for `regard cost --machine this` and stored."""

import torch

from regard.bench import limits
from regard.cost.machine import Machine
from regard.cost.this_machine import NAME, fast_memory, identity, store_this_machine, stored_at
from regard.errors import ProblemError
from regard.native import absence

TYPES = (torch.float32, torch.bfloat16)
"""Types whose products are measured; float16 is computed as float32 here."""

TRIES = 5
"""Measurements of a limit, of which the best counts: other load only lowers them."""


def measure_this_machine() -> Machine:
    """Measure the processor in under a second, store its limits, and return them.

    Raises:
        ProblemError: the compiled library, which measures them, is missing.
    """
    threads = torch.get_num_threads()
    flops = {_name(dtype): _best([limits.products(dtype, threads, 0.05) for _ in range(TRIES)]) for dtype in TYPES}
    bandwidth = _best([limits.stream(threads) for _ in range(TRIES)])
    machine = Machine(
        name=NAME,
        title=identity(),
        source=f"measured here: {stored_at()}",
        flops=flops,
        bandwidth=bandwidth,
        memory=limits.MEMORY,
        fast_memory=fast_memory(),
    )
    store_this_machine(machine)
    return machine


def _best(rates: list[float | None]) -> float:
    measured = [rate for rate in rates if rate is not None]
    if not measured:
        raise ProblemError(f"this machine cannot be measured: {absence()} Name another one with --machine.")
    return max(measured)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
