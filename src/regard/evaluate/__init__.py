"""Does a model hold at length? Needles, retrieval, RULER's tasks, questions and losses by position.

```
run.py      `evaluate`: a task, a model, a file of results
task.py     what a task is; tasks.py: the tasks by their names
  tasks     retrieval.py (needles, pass keys, values), documents.py (questions, recall), losses.py, ruler/
  texts     corpus.py (Moby-Dick), haystack.py (texts around needles), prompts.py (the published wordings)
models.py   what is evaluated; tokens.py (tokenizers), chat_template.py, model_digest.py (which model it is)
answer.py   the scores of an example; common_prefix.py: what examples share is read once
records.py  results as lines of JSON; results.py: tables; loss_results.py: losses by position; intervals.py: 95 %
picture.py, page.py   results as SVG and as HTML
predictions.py        a cache beside the plain one, token by token
harness.py            the tasks in lm-evaluation-harness
```
"""

from regard.evaluate.documents import Documents, Recall
from regard.evaluate.intervals import Interval, wilson
from regard.evaluate.losses import Extrapolation, Perplexity, Stream
from regard.evaluate.models import CacheOptions, Model, Reader, as_model
from regard.evaluate.results import CellResult, Results
from regard.evaluate.retrieval import KeyValues, Needle, Passkey
from regard.evaluate.run import evaluate
from regard.evaluate.task import Passage, Question, Task
from regard.evaluate.tasks import TASKS, task_of
from regard.evaluate.tokens import Tokenizer

__all__ = [
    "TASKS",
    "CacheOptions",
    "CellResult",
    "Documents",
    "Extrapolation",
    "Interval",
    "KeyValues",
    "Model",
    "Needle",
    "Passage",
    "Passkey",
    "Perplexity",
    "Question",
    "Reader",
    "Recall",
    "Results",
    "Stream",
    "Task",
    "Tokenizer",
    "as_model",
    "evaluate",
    "task_of",
    "wilson",
]
