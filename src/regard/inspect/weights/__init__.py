"""The weights of one call as a lazy map.

| file | content |
|---|---|
| `lazy.py` | `Weights`: rows, columns, pairs, tiles, pictures |
| `scores.py` | the scores before the softmax: the formula |
| `far_rows.py` | the log of the softmax denominator in two numbers, where one does not suffice |
| `tiles.py` | sums, pictures and largest weights over tiles |
| `spans.py` | which keys some rows may see, from the bounds of the mask |
| `some_heads.py` | heads by their indices, and their key heads |
| `index.py` | checked indices |
"""
