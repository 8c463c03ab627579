"""A digest of what ranks compare with one another."""

import hashlib


def digest(*parts: str | bytes) -> str:
    """A short text that differs where the parts do, the same in every process."""
    found = hashlib.blake2b(digest_size=6)
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
    return found.hexdigest()
