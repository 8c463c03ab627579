"""What models do in training and interventions refuse: dropout, and gradient checkpointing.

With dropout two runs differ by chance, also without an intervention. With gradient checkpointing layers run again in
the backward pass, outside of the intervention, or (`use_reentrant=True`) run without gradients at first.
"""

from collections.abc import Container, Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from regard.calls import Call
from regard.errors import ProblemError
from regard.inspect.intervene.heads import Site


def check_no_dropout(site: Site, call: Call) -> None:
    """Raise `ProblemError` if the call drops weights."""
    if call.dropout:
        raise ProblemError(f"layer {site.layer} drops weights (dropout {call.dropout}): call model.eval() first.")


@contextmanager
def without_dropout(model: nn.Module | None) -> Generator[None]:
    """A block in which the model runs, without random numbers if it is in training mode.

    Some models drop elements by a function, without a module for it (OPT): only the random numbers show that.

    Raises:
        ProblemError: random numbers were drawn, when the block ends.
    """
    if model is None or not any(module.training for module in model.modules()):
        yield
        return
    before = _random_states(model)
    yield
    if not all(map(torch.equal, before, _random_states(model))):
        raise ProblemError(
            f"{type(model).__name__} is in training mode, and its run drew random numbers, as dropout does: two runs "
            "differ by chance. Call model.eval() first."
        )


def _random_states(model: nn.Module) -> list[Tensor]:
    """The states of torch's random numbers on the CPU and on the accelerators of the model."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type not in ("cpu", "meta")}
    accelerators = (torch.get_device_module(device).get_rng_state(device) for device in sorted(devices, key=str))
    return [torch.get_rng_state(), *accelerators]


def check_gradients(attended: Iterable[Site], differentiated: Container[Site]) -> None:
    """Raise `ProblemError` if a layer attended, and never with gradients."""
    if cut := next((site for site in attended if site not in differentiated), None):
        raise ProblemError(
            f"layer {cut.layer} ran without gradients: let it run without torch.no_grad, inference_mode and gradient "
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
