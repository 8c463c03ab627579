"""Seeds that dropout draws from, and the share of what they give that is dropped."""

import torch


def draw() -> int:
    """A seed, from torch's generator of the CPU."""
    return int(torch.randint(1 << 62, (), device="cpu"))


def mixed(seed: int, *indices: int) -> int:
    """Another seed for each tuple of indices: what SplitMix64 makes of them.

    >>> mixed(1, 2) == mixed(1, 2), mixed(1, 2) == mixed(1, 3)
    (True, False)
    """
    for index in indices:
        seed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (seed ^ (seed >> 31)) >> 1


def dropout_threshold(probability: float) -> int:
    """The probability as a share of all 32-bit integers, as in native/dropout.h: integers below it drop their pair.

    >>> dropout_threshold(0.25) / 2**32, dropout_threshold(1.0)
    (0.25, 4294967295)
    """
    return min(int(probability * 2**32 + 0.5), 2**32 - 1)
