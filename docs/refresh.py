"""Makes what the documents show, with the real commands.

```
python docs/refresh.py            # all parts; on a quiet machine, since some measure
python docs/refresh.py demo       # one of: explain, demo, generate, schedules, speed, api
```

| part | shown in |
|---|---|
| explain | README.md |
| demo, generate | docs/command.md; demo also makes docs/page.png |
| schedules | docs/schedules.md |
| speed | docs/speed.svg, drawn from docs/performance/zen5.md, which `./bench --write` measures |
| api | docs/api.md, from the `__all__` of each public module |
"""

# a script, not a part of a package

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import api_page

ROOT = Path(__file__).parents[1]
README, COMMAND = ROOT / "README.md", ROOT / "docs" / "command.md"
REGARD = Path(sys.executable).parent / "regard"


def explain() -> None:
    """What the README's first example prints."""
    first = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert first is not None
    _show(README, "explain", _output([sys.executable, "-c", first.group(1)]))


def demo() -> None:
    """What `regard inspect` prints, and docs/page.png, a picture of the page that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "regard.html"
        shown = _output([REGARD, "inspect", "--html", page], COLUMNS="100").replace(str(page), "regard.html")
        picture = [sys.executable, ROOT / "docs" / "screenshot.py", page, ROOT / "docs" / "page.png"]
        _output([*picture, "--state", "head=18.6", "--scale", "1.25"])
    _show(COMMAND, "demo", shown)


def generate() -> None:
    """What `regard generate` writes to stdout and stderr."""
    command = [REGARD, "generate", "Why is the sky blue?", "--cache", "int8"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    _show(COMMAND, "generate", done.stdout)


def schedules() -> None:
    """The tables of `python -m benchmarks.schedules`."""
    _output([sys.executable, "-m", "benchmarks.schedules", "--write"])


def speed() -> None:
    """The picture in the README, from the tables of the machine on which other libraries were measured."""
    drawn = [sys.executable, "-m", "benchmarks.speed_picture"]
    _output([*drawn, ROOT / "docs" / "performance" / "zen5.md", ROOT / "docs" / "speed.svg"])


def api() -> None:
    """The page of all public names."""
    api_page.PAGE.write_text(api_page.page())


def _output(command: list[str | Path], **environment: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True)
    return done.stdout


def _show(document: Path, name: str, output: str) -> None:
    """Put an output between its marks in a document."""
    marked = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
    block = f"<!-- {name} -->\n```\n{output.strip()}\n```\n<!-- /{name} -->"
    document.write_text(marked.sub(lambda _: block, document.read_text()))


PARTS = {"explain": explain, "demo": demo, "generate": generate, "schedules": schedules, "speed": speed, "api": api}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
