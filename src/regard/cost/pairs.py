"""The pairs of query and key that a pattern keeps, in closed form: integers alone, neither torch nor a schedule.

Every pattern here is a mask of `regard.describe.mask`, and a schedule of that mask keeps the same number of pairs. The
sums are of `min(max(first + i, 0), most)` over consecutive i, which is a trapezium.

>>> Pattern().pairs(queries=4096, keys=4096) == 4096 * 4097 // 2
True
>>> Pattern(window=4096, sinks=4).pairs(queries=1, keys=32768)
4100
"""

from dataclasses import dataclass

from regard.errors import ProblemError
from regard.integers import is_integer


@dataclass(frozen=True)
class Pattern:
    r"""Which keys a query at position q may see.

    | fields | mask |
    |---|---|
    | none | `Causal()` |
    | `causal=False` | no mask |
    | `window=n` | `Causal() & Window(n)`; with `causal=False` `Window(n, n)` |
    | `window=n, sinks=s` | `Causal() & (Window(n) \| Prefix(s))` |
    | `prefix=n` | `Causal() \| Prefix(n)` |
    | `chunk=n` | `Causal() & Documents(ids)`, `ids[k] = k // n`: the chunks of Llama 4 |
    | `step=n` | `Causal() & Dilated(n)` |

    Raises:
        ProblemError: a field is out of range, or two fields contradict each other.
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0
    prefix: int = 0
    chunk: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("sinks", 0), ("prefix", 0), ("chunk", 1), ("step", 1)):
            value = getattr(self, name)
            if value is not None and not is_integer(value, least):
                raise ProblemError(f"Pattern({name}={value!r}): expected a whole number, {least} or more.")
        if self.sinks and self.window is None:
            raise ProblemError(f"Pattern(sinks={self.sinks}) without a window: sinks are first tokens beyond a window.")
        kinds = {"window": self.window, "prefix": self.prefix, "chunk": self.chunk, "step": self.step > 1}
        chosen = [name for name, value in kinds.items() if value]
        if len(chosen) > 1 or (chosen and chosen != ["window"] and not self.causal) or (self.sinks and not self.causal):
            raise ProblemError(
                f"{self}: expected causal with at most one of {', '.join(kinds)}, or a window both ways."
            )

    def pairs(self, *, queries: int, keys: int, offset: int | None = None) -> int:
        """Kept pairs of one head and batch row.

        Args:
            offset: position of the first query; None: the last query is at the last key.
        """
        start = keys - queries if offset is None else offset
        if not queries or not keys:
            return 0
        if self.chunk:
            return _chunked(start, start + queries, keys, self.chunk)
        if self.step > 1:
            return _dilated(start, start + queries, keys, self.step)
        ends = queries * keys if not self.causal else _ramp(start + 1, queries, keys)
        if self.prefix:
            return ends + queries * min(self.prefix, keys) - _ramp(start + 1, queries, min(self.prefix, keys))
        if self.window is None:
            return ends
        if not self.causal:
            ends = _ramp(start + self.window, queries, keys)
        before = start + 1 - self.window  # keys before the window of the first query
        return ends - _ramp(before, queries, keys) + _ramp(before, queries, min(self.sinks, keys))

    def keys_seen(self, *, queries: int, keys: int) -> int:
        """Keys that any of the last `queries` of `keys` tokens sees: what is read, once each.

        >>> Pattern(window=512).keys_seen(queries=1, keys=4096), Pattern(chunk=8192).keys_seen(queries=10, keys=8200)
        (512, 8200)
        """
        if not queries:
            return 0
        if self.chunk:
            return keys - (keys - queries) // self.chunk * self.chunk
        if self.step > 1:  # queries at distances below the step see no key twice, and `step` of them see every key
            return self.pairs(queries=min(queries, self.step), keys=keys)
        return keys if self.window is None else min(keys, queries - 1 + self.window + self.sinks)

    def stored(self, context: int) -> int:
        """Tokens that a KV cache must hold, so that the next query sees what it may see of `context` tokens.

        >>> Pattern().stored(32768), Pattern(window=4096, sinks=4).stored(32768), Pattern(chunk=8192).stored(10000)
        (32768, 4100, 8192)
        """
        if self.chunk:
            return min(context, self.chunk)
        return context if self.window is None else min(context, self.window + self.sinks)

    @property
    def is_local(self) -> bool:
        """Whether it is the window, or the chunks, of a model; one with sinks is what a cache keeps of others."""
        return bool(self.chunk) or (self.window is not None and not self.sinks)

    def __str__(self) -> str:
        if self.window is not None:
            sinks = f" + {self.sinks} sinks" if self.sinks else ""
            return f"window {self.window:,}{sinks}" + ("" if self.causal else " both ways")
        if self.chunk:
            return f"chunks of {self.chunk:,}"
        if self.prefix:
            return f"causal after a prefix of {self.prefix:,}"
        return "full" if not self.causal else f"every {self.step}th" if self.step > 1 else "causal"


def _ramp(first: int, count: int, most: int) -> int:
    """The sum of `min(max(first + i, 0), most)` over 0 <= i < count.

    >>> _ramp(-2, 6, 2)
    5
    """
    return _triangle(first + count - 1, most) - _triangle(first - 1, most)


def _triangle(end: int, most: int) -> int:
    """The sum of `min(x, most)` over 1 <= x <= end; 0 for no x."""
    low, high = max(0, min(end, most)), max(0, end - most)
    return low * (low + 1) // 2 + high * most


def _chunked(start: int, stop: int, keys: int, chunk: int) -> int:
    """Pairs of queries `start` to `stop` with the keys of their own chunk up to themselves."""

    def before(end: int) -> int:
        inside, whole = min(end, keys), min(end, keys) // chunk
        rest = inside - whole * chunk
        beyond = min(end, -(-keys // chunk) * chunk) - inside  # queries past the last key, in its chunk
        return whole * chunk * (chunk + 1) // 2 + rest * (rest + 1) // 2 + max(0, beyond) * (keys % chunk)

    return before(max(stop, 0)) - before(max(start, 0))


def _dilated(start: int, stop: int, keys: int, step: int) -> int:
    """Pairs whose distance is a multiple of `step`, the key not after the query."""

    def before(end: int) -> int:  # queries 0 <= q < end
        inside = min(end, keys)
        whole, rest = divmod(inside, step)
        total = step * whole * (whole + 1) // 2 + rest * (whole + 1)
        for residue in range(step) if end > inside else ():  # queries past the last key
            queries = -(-(end - residue) // step) - max(0, -(-(inside - residue) // step)) if end > residue else 0
            total += max(0, queries) * max(0, -(-(keys - residue) // step))
        return total

    return before(max(stop, 0)) - before(max(start, 0))
