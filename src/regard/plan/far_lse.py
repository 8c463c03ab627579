"""From which size on a log-sum-exp in one floating-point number is too coarse to compute weights from."""

import torch

FAR_LSE = {torch.float32: 1 << 15, torch.float64: 1 << 44}
"""The distance from 0 from which on rounding of a log-sum-exp changes weights by 0.2 % and more."""
