"""Does a model hold at length? Needles, retrieval, RULER's tasks, questions and losses by position."""

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
