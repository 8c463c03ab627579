"""`Rolling` with codes: plain sinks, turned on, and behind them codes and a plain tail that tokens are dropped from.

```
sinks              codes                                    tail
plain, written     whole groups; of the first one, slots    plain
anew each step     of forgotten tokens are skipped
```

Memory for codes holds two windows; when it is full, what is kept of it is brought to its front, once in a window.
"""

from torch import Tensor

from regard.cache.quantised import QuantisedStore
from regard.cache.sinks import Sinks
from regard.cache.store import CachedTensor, Form
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.stored import Contiguous, Rolling


class RollingCodes:
    """A `QuantisedStore` with the layout's sinks, from behind which tokens are dropped."""

    def __init__(self, layout: Rolling, codec: Codec, form: Form) -> None:
        self.layout = layout
        self._sinks = Sinks(layout.sinks, layout.rope, form, is_turned=codec.rotate)
        self._kept = QuantisedStore(Contiguous(), codec, form, sinks=layout.sinks)
        self._kept.hold(2 * layout.window)
        self._gone = 0

    @property
    def form(self) -> Form:
        return self._kept.form

    @form.setter
    def form(self, form: Form) -> None:
        self._kept.form = form

    @property
    def tokens(self) -> int:
        return self._kept.tokens

    @property
    def tokens_seen(self) -> int:
        return self._kept.tokens_seen

    @property
    def min_crop(self) -> int:
        return self._gone and self._gone + self.layout.window - 1

    @property
    def bytes(self) -> int:
        return self._kept.bytes

    @property
    def allocated_bytes(self) -> int:
        return self._sinks.allocated_bytes + self._kept.allocated_bytes

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        new, before, window = k.shape[2], self._kept.tokens, self.layout.window
        if not new:
            return self._kept.found()
        gone = max(before - window + 1, 0)  # with one new token there are `window` again
        found = self._kept.rolled(k, v, gone)
        if before < self.layout.sinks:
            self._sinks.put(before, k, v)
        if gone:
            self._gone += gone
            if self._sinks.rope is not None:
                self._sinks.keys(self._kept.sinks, self._gone, min(before - gone + new, window))
        return found

    def crop(self, tokens: int) -> None:
        self._kept.crop(tokens)

    def reset(self) -> None:
        self._kept.reset()
        self._gone = 0

    def select(self, rows: Tensor) -> None:
        self._kept.select(rows)
        self._sinks.select(rows)

    def keep(self, index: Tensor) -> None:
        raise ProblemError(f"{self.layout!r} forgets by itself: of what it keeps nothing is chosen.")

    def keys(self) -> Tensor:
        return self._kept.keys()
