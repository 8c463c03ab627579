"""The tasks of RULER (Hsieh et al. 2024, arXiv:2404.06654), with the prompts, sizes and metrics of its repository.

| task | hidden | expected |
|---|---|---|
| `niah_single_1`, `_2`, `_3` | one number in noise; one in a book; one UUID in a book | its value |
| `niah_multikey_1`, `_2`, `_3` | four keys in a book; as many as fit, of numbers; of UUIDs | the value of one |
| `niah_multivalue`, `niah_multiquery` | one key with four values; four keys | all four |
| `vt` | a chain of five variables, assigned one to the next, in noise | the variables with a value |
| `cwe` | ten common words among others in a numbered list | the ten |
| `fwe` | words drawn from a zeta distribution | the three most frequent |

A prompt with the tokens to generate is as long as fits in the length. The model generates greedily, and the score is
the share of the answers in its text, whatever their case. A book that is too short is repeated.

What differs from RULER: the book is Moby-Dick, where RULER takes essays that are not free; words are drawn from lists
of this package or from the book, where RULER takes those of the package wonderwords; all keys of a text are different;
the example before the text of `vt` and `cwe` is the same for all samples.

Files: `task.py` (a prompt that fills a length), `needles.py` (`niah_...`), `variables.py` (`vt`), `words.py` (`cwe` and
`fwe`).
"""

from regard.evaluate.ruler.needles import NIAH
from regard.evaluate.ruler.variables import VariableTracking
from regard.evaluate.ruler.words import CommonWords, FrequentWords

RULER = {**NIAH, "vt": VariableTracking, "cwe": CommonWords, "fwe": FrequentWords}
"""Classes of tasks by their names."""
