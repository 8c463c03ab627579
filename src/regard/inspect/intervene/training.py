"""What models do in training and interventions refuse: dropout, and gradient checkpointing.

With dropout two runs differ by chance, also without an intervention. With gradient checkpointing layers run again in
the backward pass, outside of the intervention, or (`use_reentrant=True`) run without gradients at first.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from regard.calls import Call
from regard.errors import ProblemError
from regard.inspect.intervene.heads import Site


def check_no_dropout(model: nn.Module | None, site: Site, call: Call) -> None:
    """Raise `ProblemError` if the call drops weights, or an `nn.Dropout` of the model drops elements."""
    if call.dropout:
        raise ProblemError(f"layer {site.layer} drops weights (dropout {call.dropout}): call model.eval() first.")
    for path, module in () if model is None else model.named_modules():
        if isinstance(module, nn.Dropout) and module.training and module.p:
            raise ProblemError(f"module {path!r} drops elements (dropout {module.p}): call model.eval() first.")


def refuse_without_gradients(site: Site) -> NoReturn:
    """Raise `ProblemError` for a layer that ran without gradients."""
    raise ProblemError(
        f"layer {site.layer} ran without gradients: let it run without torch.no_grad, inference_mode and gradient "
        "checkpointing (use_reentrant=True), which model.eval() switches off in models of transformers."
    )


def gradients_of(y: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """dy/d(input) of each input, 0 where y does not depend on it.

    Raises:
        ProblemError: gradient checkpointing ran layers again in another way than before.
    """
    try:
        return torch.autograd.grad(y, inputs, materialize_grads=True)
    except CheckpointError as error:
        raise ProblemError(
            "gradient checkpointing runs layers again in the backward pass, outside of the intervention: switch it off "
            "first, in models of transformers by model.eval()."
        ) from error
