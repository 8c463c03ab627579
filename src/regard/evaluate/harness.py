"""Tasks of regard in lm-evaluation-harness, and its generation tasks in regard.

```python
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from regard.evaluate import Needle, as_model
from regard.evaluate.harness import harness_config, questions_of

task = ConfigurableTask(config=harness_config(Needle(), as_model(model, tokenizer), folder))
simple_evaluate(model=HFLM(model, tokenizer=tokenizer), tasks=[task])

examples = questions_of(get_task_dict(["squadv2"])["squadv2"], as_model(model, tokenizer), limit=10)
```

The package lm-eval is not imported here: a config is a dict, and a task of it is given.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from regard.errors import ProblemError
from regard.evaluate.answer import check_written, found_in
from regard.evaluate.models import Model
from regard.evaluate.task import SPARE, Question, Task
from regard.evaluate.tasks import check_task


def harness_config(task: Task, model: Model, folder: str | Path) -> dict[str, Any]:
    """The config of `lm_eval.api.task.ConfigurableTask` for a task with questions.

    Args:
        task: such as `Needle()`, or a task of RULER.
        model: whose tokenizer sizes the prompts.
        folder: where the examples are written, as lines of JSON.

    The score is the share of the answers in the generated text, as RULER scores: a text that the answer is in is right,
    where `regard evaluate` wants the answer of a needle at once. An answer counts as it is, not as tokenizers spell it.

    Raises:
        ProblemError: the task measures losses, has answers that are no texts or that the tokenizer cannot write, or a
            setting that no text has.
    """
    check_task(task)
    examples = list(task.examples(model))
    questions = [example for example in examples if isinstance(example, Question)]
    if len(questions) < len(examples):
        raise ProblemError(f"{task.name} measures losses: lm-evaluation-harness gets tasks with questions.")
    if not all(each.answers for each in questions):
        raise ProblemError(
            f"the answers of {task.name} are tokens: lm-evaluation-harness gets tasks with texts, such as needle."
        )
    for each in questions:
        check_written(model, each)
    decode = model.tokenizer.decode
    if getattr(task, "chat", False):  # the special tokens of the chat template are a part of the prompt
        decode = model.tokenizer.decode_all or decode
    lines = [
        {"prompt": decode(each.tokens), "answers": list(each.answers), "name": each.name, "any": each.any_answer}
        for each in questions
    ]
    path = Path(folder) / f"{task.name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    new_tokens = max(each.new_tokens or len(each.target) + SPARE for each in questions)
    return {
        "task": f"regard_{task.name}", "dataset_path": "json", "test_split": "test", "output_type": "generate_until",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(folder)},
        "doc_to_text": "prompt", "doc_to_target": "{{answers}}", "process_results": process_results,
        "generation_kwargs": {"do_sample": False, "max_gen_toks": new_tokens, "until": []},
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }  # fmt: skip


def process_results(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The score of a generated text, as lm-evaluation-harness calls it."""
    return {"score": found_in(results[0], doc["answers"], any_of=doc["any"])}


def questions_of(task: Any, model: Model, limit: int | None = None) -> list[Question]:
    """The examples of a `generate_until` task of lm-evaluation-harness, scored by the share of its answers in the text.

    Args:
        task: an `lm_eval.api.task.ConfigurableTask`.
        model: whose tokenizer encodes the prompts.
        limit: the number of documents, from the first on; None: all.

    Raises:
        ProblemError: the task does not generate.
    """
    if task.OUTPUT_TYPE != "generate_until":
        raise ProblemError(f"{task} has the output type {task.OUTPUT_TYPE}: expected generate_until.")
    docs = task.test_docs() if task.has_test_docs() else task.validation_docs()
    new_tokens = int(task.config.generation_kwargs.get("max_gen_toks", 128))
    found = list[Question]()
    for i, doc in enumerate(itertools.islice(docs, limit)):
        target: Any = task.doc_to_target(doc)
        answers = tuple(map(str, cast("list[Any]", target) if isinstance(target, list) else [target]))
        prefix = doc.get("gen_prefix")
        text = f"{task.doc_to_text(doc)} {prefix}" if prefix else task.doc_to_text(doc)
        context = (*model.tokenizer.start, *model.tokenizer.encode(text))
        cell: dict[str, int | float | str] = {"task": task.config.task}
        found.append(Question(f"{i}", cell, context[:-1], context[-1:], (), answers, new_tokens))
    return found
