"""The page: a report as one HTML file that opens by a double click and asks the network for nothing.

```
report -> scores and tokens as JSON  +  pictures and close-ups, deflated, in base64  +  view/*.{html,css,js}
```

The same report gives the same bytes. A Content-Security-Policy in the file allows its own script and style, by hash,
and nothing else: a token can be any text, is escaped in the JSON, and is only ever shown as text.

| file | what stands in it |
|---|---|
| `file.py` | the page put together and written; what the browser may do with it |
| `content.py` | scores, tokens and captions, as the script reads them |
| `pictures.py` | pictures packed layer by layer |
| `closes.py` | close-ups packed head by head: any single weight can be computed from them |
| `budget.py` | which close-ups and pictures fit; the page says what was left out |
| `script.py` | view/ as one script and one style sheet |
| `place.py` | whether a file can be written where it is to be |
| `plain.py` | JSON that can stand in a page |
"""

from regard.inspect.page.file import BUDGET, framed, page, write_page
from regard.inspect.page.plain import as_json, finite

__all__ = ["BUDGET", "as_json", "finite", "framed", "page", "write_page"]
