"""Whether the output of a projection is that of its weight and bias, and whether these are trained.

Conversions read weights, so they refuse a projection with an adapter, a hook or a forward of its own. Pruning and norms
of torch.nn.utils are hooks that compute the weight when the projection is called: `compute_tensors` runs these alone.
"""

from typing import Any

from torch import nn

from regard.errors import RefusalError
from regard.plan.checks import has_own_operators


def check_linear(module: nn.Module, *names: str) -> None:
    """Raise `RefusalError` unless the output of each of these projections is that of its weight and bias."""
    for name in names:
        projection = getattr(module, name)
        if (reason := why_not_linear(projection)) is not None:
            raise RefusalError(f"{name} {reason}")


def why_not_linear(projection: nn.Module, *, with_hooks: bool = True) -> str | None:
    """Why the weight and the bias of a projection do not say what its output is; None if they do.

    A parametrization, such as weight_norm, changes the weight alone.

    Args:
        with_hooks: whether a hook is a reason, as it may change the input or the output; most only look at them.
    """
    if (reason := with_forward_of_its_own(projection)) is not None:
        return reason
    if has_other_forward(projection):
        return "has a forward other than that of its class, which may change its output: delete that attribute first"
    if with_hooks and _has_hooks(projection):
        return "has a forward hook, which may change its input or output: remove the hook first"
    return None


def _has_hooks(module: nn.Module) -> bool:
    """Whether a hook may change its input or output; those of torch.nn.utils (pruning, norms) compute its weight.

    So does one of a user's subclass of them, such as of `BasePruningMethod`, unless it defines `__call__`.
    """
    before = module._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
    return bool(module._forward_hooks) or not all(map(_computes_tensor, before))  # pyright: ignore[reportPrivateUsage]


def _computes_tensor(hook: Any) -> bool:
    """Whether a hook before a call computes a weight and changes no input."""
    return (getattr(type(hook).__call__, "__module__", None) or "").startswith("torch.nn.utils.")


def compute_tensors(*modules: nn.Module | None) -> None:
    """Compute what hooks of torch.nn.utils (pruning, norms) compute when a module is called: its weight, or another.

    For code that reads the weight and does not call the module. Without this the weight is that of the last call, also
    where a step of an optimizer or `load_state_dict` has changed what it is computed from.
    """
    for module in modules:
        for hook in () if module is None else module._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]
            if _computes_tensor(hook):
                hook(module, ())


def with_forward_of_its_own(projection: nn.Module) -> str | None:
    """Why the class of a projection may compute more than its weight and bias say; None for `nn.Linear`."""
    if type(projection).forward is nn.Linear.forward:
        return None
    kind = type(projection).__name__
    return f"is a {kind} with a forward of its own: merge the adapter first, or put an nn.Linear in its place"


def opaque_weight(projection: nn.Linear) -> str | None:
    """The class of a weight that defines its own operators, so that the module must be called; None of a plain one.

    torchao quantises the weight alone: the projection stays an `nn.Linear`.
    """
    weight = projection.weight
    return type(weight).__name__ if type(weight) is not nn.Parameter and has_own_operators(weight) else None


def has_other_forward(module: nn.Module) -> bool:
    """Whether an attribute of the module replaces the forward of its class, as accelerate's hooks do."""
    if "forward" not in vars(module):
        return False
    forward = module.forward  # accelerate leaves the module's own method there when its hooks are removed
    owner, function = getattr(forward, "__self__", None), getattr(forward, "__func__", None)
    return owner is not module or function is not type(module).forward


def is_trained(module: nn.Module, name: str) -> bool:
    """Whether a weight or bias of a module is trained; one that is computed is if some Parameter that it is from is.

    The computed tensor itself does not tell: one that was last computed under `torch.no_grad` requires no gradient.
    """
    tensor = getattr(module, name)
    if tensor is None or isinstance(tensor, nn.Parameter):
        return tensor is not None and tensor.requires_grad
    parameters = module.named_parameters()  # weight_orig, weight_g, parametrizations.weight.original
    found = [p.requires_grad for key, p in parameters if key.removeprefix("parametrizations.").startswith(name)]
    return any(found) if found else tensor.requires_grad
