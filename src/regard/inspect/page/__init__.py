"""The page: a report as one HTML file that opens by a double click and asks the network for nothing.

```
report -> scores and tokens as JSON  +  pictures and close-ups, deflated, in base64  +  view/*.{html,css,js}
```

The same report gives the same bytes. A Content-Security-Policy in the file allows its own script and style, by hash,
and nothing else: a token can be any text, is escaped in the JSON, and is only ever shown as text.

| file | content |
|---|---|
| `file.py` | builds the page and writes it; what the browser allows it |
| `data.py` | scores, tokens and captions, as JSON for the script |
| `packing.py` | pictures and close-ups as compressed base64; which of them are included |
| `assets.py` | the files of view/: HTML, style, the modules joined into one script, icon |
"""

from regard.inspect.page.data import as_json, finite
from regard.inspect.page.file import BUDGET, framed, page, write_page

__all__ = ["BUDGET", "as_json", "finite", "framed", "page", "write_page"]
