"""The list of the files that a conversion wrote, stored beside them: a later conversion may replace these.

```
regard-convert.json   {"files": {"config.json": [612, 1763793300123456789], ...}, "regard": "0.1.0"}
```

Of each file its bytes and the time of its last change, in nanoseconds: weights that were trained on since have another.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from regard import __version__

NAME = "regard-convert.json"


def write_manifest(folder: Path) -> None:
    """List the files of a folder in a file of their own."""
    files = {path.relative_to(folder).as_posix(): _state(path) for path in sorted(_entries(folder))}
    # the version is not first: results of commands begin with it, and the next command may replace those
    text = json.dumps({"files": files, "regard": __version__}, indent=1)
    (folder / NAME).write_text(f"{text}\n", encoding="utf-8")


def not_listed(folder: Path) -> list[str]:
    """What is in a folder and not as its list says: files that were added, changed, or are in no list at all."""
    files, found = _listed(folder), list[str]()
    for path in sorted(_entries(folder)):
        name = path.relative_to(folder).as_posix()
        if name != NAME and files.get(name) != _state(path):
            found.append(name)
    return found


def _listed(folder: Path) -> dict[str, object]:
    try:
        return json.loads((folder / NAME).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _entries(folder: Path) -> Iterator[Path]:
    """Whatever is no folder, in all depths."""
    return (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _state(path: Path) -> list[int]:
    found = path.lstat()
    return [found.st_size, found.st_mtime_ns]
