"""Makes what the README shows, with the real commands: the demo's output, the page's picture, the schedules.

`./bench --write` writes docs/performance.md itself.

```
python docs/refresh.py            # all; on a quiet machine, since it measures
python docs/refresh.py demo       # one of: explain, demo, generate, schedules, speed
```
"""

# a script, not a part of a package

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def explain() -> str:
    """What the README's first example prints."""
    first = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert first is not None
    return f"```\n{_output([sys.executable, '-c', first.group(1)]).strip()}\n```"


def demo() -> str:
    """What `regard inspect` prints, and docs/page.png, a picture of the page that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "regard.html"
        command = [Path(sys.executable).parent / "regard", "inspect", "--html", page]
        shown = _output(command, COLUMNS="100").replace(str(page), "regard.html")
        picture = [sys.executable, ROOT / "docs" / "screenshot.py", page, ROOT / "docs" / "page.png"]
        _output([*picture, "--state", "head=18.6", "--scale", "1.25"])
    return f"```\n{shown.strip()}\n```"


def generate() -> str:
    """What `regard generate` prints: the text, and its report on stderr."""
    regard = Path(sys.executable).parent / "regard"
    command = [regard, "generate", "Why is the sky blue?", "--cache", "int8"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return f"```\n{done.stdout.strip()}\n```"


def schedules() -> str:
    """The tables of `./bench schedules`, also written to docs/schedules.md."""
    _output([sys.executable, "-m", "benchmarks.schedules", "--write"])
    return (ROOT / "docs" / "schedules.md").read_text().split("\n", 2)[2].strip()


def speed() -> None:
    """docs/speed.svg, from the tables of docs/performance.md: the README shows it."""
    drawn = [sys.executable, "-m", "benchmarks.speed_picture"]
    _output([*drawn, ROOT / "docs" / "performance.md", ROOT / "docs" / "speed.svg"])


def _output(command: list[str | Path], **environment: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    """Put each part between its marks in the README."""
    parts = {"explain": explain, "demo": demo, "generate": generate, "schedules": schedules}
    for name in sys.argv[1:] or (*parts, "speed"):
        if name == "speed":
            speed()
            continue
        text = parts[name]()
        marked = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
        whole = marked.sub(
            lambda _, text=text, name=name: f"<!-- {name} -->\n{text}\n<!-- /{name} -->", README.read_text()
        )
        README.write_text(whole)


if __name__ == "__main__":
    main()
