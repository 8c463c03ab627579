"""`RollbackOnFailure`: what a failed call appended to caches is removed, so that the caller can repeat it."""

from regard.cache import KVCache


class RollbackOnFailure:
    """If the body raises, remove the tokens that it appended to these caches; None is no cache.

    A class, as entering a generator takes longer, and each layer enters one in each step of decoding.
    """

    __slots__ = ("_before",)

    def __init__(self, *caches: KVCache | None) -> None:
        self._before = [(cache, cache.tokens_seen) for cache in caches if cache is not None]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            return
        for cache, seen in self._before:
            if cache.tokens_seen > seen:
                cache.crop(seen)
