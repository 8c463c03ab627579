"""Checks of what a module gets: flags, inputs, caches."""

from torch import Tensor

from regard.cache import KVCache
from regard.cache.check import start_policy
from regard.cache.query_observer import QueryObserver
from regard.describe.score import Dot
from regard.errors import ProblemError
from regard.plan.checks import not_a_tensor
from regard.storage.stored import Rolling


def check_flags(**flags: object) -> None:
    """Raise `ProblemError` unless each is True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ProblemError(f"{name} is {flag!r}: expected True or False.")


def check_input(name: str, x: object, expected: str) -> None:
    """Raise `ProblemError` unless it is a tensor."""
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x, f"a tensor {expected}")


def check_cache(cache: object) -> None:
    """Raise `ProblemError` unless it is a KV cache or None."""
    if cache is not None and not isinstance(cache, KVCache):
        raise ProblemError(f"cache is {cache!r}: expected a regard.cache.KVCache, or None.")


def check_rolling(cache: KVCache | None, rope: object) -> None:
    """Raise `ProblemError` unless a rolling cache rotates its sinks with the module's rope."""
    if cache is None or not isinstance(cache.layout, Rolling) or cache.layout.rope == rope:
        return
    raise ProblemError(
        f"the cache is {cache.layout!r}, and the module's position is {rope!r}: the cache must rotate its sinks with "
        f"the module's rope, so Rolling(window={cache.layout.window}, sinks={cache.layout.sinks}, rope={rope!r})."
    )


def check_observer(cache: KVCache | None, **options: object) -> None:
    """Raise `ProblemError` if a policy counts attention weights from the queries, and these options change them.

    A sink is no such option: the policy counts how the keys share the weight that the sink leaves.
    """
    if cache is None or cache.evict is None:
        return
    given = [name for name, value in options.items() if value is not None and type(value) is not Dot]
    if given and isinstance(start_policy(cache.evict), QueryObserver):
        raise ProblemError(
            f"the cache has {cache.evict!r}, which computes attention weights as softmax(scale * q . k), and here they "
            f"have a {' and a '.join(given)}. Use a policy that reads no queries, such as SinksAndRecent or Knorm."
        )
