"""lm-evaluation-harness: our tasks in it give our scores, and prompts and scores of RULER are those that it has."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false

import random
import re
import sys
import types

import pytest
import torch

from regard.evaluate import Passkey, Tokenizer, as_model, evaluate, task_of
from regard.evaluate import prompts as our_prompts
from regard.evaluate.answer import answers, found_in
from regard.evaluate.harness import harness_config, questions_of
from regard.evaluate.ruler.variables import chain
from regard.evaluate.ruler.words import CommonWords, FrequentWords

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'regard[tools]'")
pytestmark = pytest.mark.filterwarnings("ignore")


def found_before(tokens):
    """A model that answers the pass key of its prompt."""
    text = bytes(tokens[0].tolist()).decode()
    key, logits = re.search(r"The pass key is (\d+)", text)[1], torch.zeros(*tokens.shape, 256)
    for end in range(max(1, len(text) - 20), len(text) + 1):
        asked = re.search(r"What is the pass key\? The pass key is( ?\d*)$", text[:end])
        if asked and len(asked[1]) < 6:
            logits[0, end - 1, ord(f" {key}"[len(asked[1])])] = 1.0
    return logits


class Harnessed:
    """A model of lm-evaluation-harness that generates by one of regard."""

    @staticmethod
    def of(model):
        from lm_eval.api.model import LM

        class Inner(LM):
            def generate_until(self, requests, **_):
                found = []
                for request in requests:
                    text, options = request.args
                    ids = tuple(model.tokenizer.encode(text))
                    from regard.evaluate import Question

                    question = Question("x", {}, ids[:-1], ids[-1:], (), ("\0",), options["max_gen_toks"])
                    ((_, answer),) = answers(model, [question])
                    found.append(answer["text"])
                return found

            def loglikelihood(self, requests, **_):
                raise NotImplementedError

            loglikelihood_rolling = loglikelihood

        return Inner()


def test_our_task_in_the_harness_gives_our_score(tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask

    task, model = Passkey((400,), (0.0, 1.0), samples=2), as_model(found_before)
    config = harness_config(task, model, tmp_path)
    found = simple_evaluate(model=Harnessed.of(model), tasks=[ConfigurableTask(config=config)], bootstrap_iters=0)
    assert found["results"]["regard_passkey"]["score,none"] == evaluate(task, model).score.value == 1


def test_a_task_of_the_harness_gives_questions_of_ours(tmp_path):
    from lm_eval.api.task import ConfigurableTask

    task, model = Passkey((400,), (0.0, 1.0), samples=2), as_model(found_before)
    theirs = questions_of(ConfigurableTask(config=harness_config(task, model, tmp_path)), model)
    assert [example.tokens for example in theirs] == [example.tokens for example in task.examples(model)]
    assert all(answer["score"] == 1 for _, answer in answers(model, theirs))


@pytest.mark.parametrize("seed", range(20))
def test_scores_are_those_of_the_harness(seed):
    from lm_eval.tasks.ruler.common_utils import string_match_all, string_match_part

    draw = random.Random(seed)
    words = ["Ape", "bee", "CAT", "dog", "eel"]
    text = " ".join(draw.sample(words, draw.randint(0, 5))).swapcase()
    wanted = draw.sample(words, 3)
    assert found_in(text, wanted) == pytest.approx(string_match_all([text], [wanted]))
    assert (found_in(text, wanted, any_of=True) > 0) == (string_match_part([text], [wanted]) > 0)


@pytest.fixture
def niah(monkeypatch):
    """Its generator of needles, without the packages of words and sentences that it loads."""
    wonderwords, nltk = types.ModuleType("wonderwords"), types.ModuleType("nltk")
    words = {"nouns": ["harbor"], "adjectives": ["calm", "wild", "grey"], "verbs": ["go"]}
    words |= {"noun": ["harbor"], "adjective": ["calm"], "verb": ["go"]}
    wonderwords.RandomWord = lambda: types.SimpleNamespace(_categories=words)
    nltk.sent_tokenize = lambda text: re.split(r"(?<=\.) ", text)
    nltk.data = types.SimpleNamespace(find=lambda name: name)
    monkeypatch.setitem(sys.modules, "wonderwords", wonderwords)
    monkeypatch.setitem(sys.modules, "nltk", nltk)
    import importlib.metadata

    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.9.1" if name == "nltk" else real(name))
    import lm_eval.tasks.ruler.niah_utils as found
    import lm_eval.tasks.ruler.prepare_niah as prepare

    return found.TEMPLATE, prepare


@pytest.mark.parametrize(
    ("keys", "values", "queries"),
    [(1, 1, 1), (3, 1, 1), (1, 4, 1), (3, 1, 3)],
    ids=["single", "keys", "values", "queries"],
)
def test_prompts_of_needles_are_those_of_the_harness(niah, keys, values, queries):
    template, prepare = niah
    text, theirs, query = prepare.generate_input_output(
        6, prepare.get_haystack("repeat"), type_haystack="repeat", num_needle_k=keys, type_needle_k="words",
        num_needle_v=values, type_needle_v="numbers", template=template, num_needle_q=queries,
    )  # fmt: skip
    asked = re.split(r", and |, ", query)
    prompt = our_prompts.niah("numbers", asked, values)
    context = text[len(prompt.before) : -len(prompt.question)]
    assert prompt.before + context + prompt.question == text
    for answer in theirs:
        assert any(our_prompts.needle("numbers", key, answer) in context for key in asked)


def test_the_prompt_of_variables_is_that_of_the_harness():
    from lm_eval.tasks.ruler.vt_utils import generate_input_output

    text, variables = generate_input_output(12, 1, 4)
    ours = chain(12, 5, random.Random(0))
    value = re.search(r"VAR \w+ = (\d+)", text)[1]
    assigned = re.search(r"VAR \w+ = (\d+)", ours.context)[1]
    whole = f"{ours.prompt.before}{ours.context}{ours.prompt.question} {ours.prompt.begun} "
    texts = text.replace(value, "N"), whole.replace(assigned, "N")
    assert len({" ".join(re.sub(r"VAR \w+ = (VAR \w+|N)", "", each).split()) for each in texts}) == 1
    assert len(variables) == len(ours.answers) == 5


def test_the_words_of_the_prompts_are_those_of_the_harness(niah, monkeypatch, tmp_path):
    (tmp_path / "book.txt").write_text(" ".join("".join(random.choices("abcde", k=6)) for _ in range(500)))
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils

    for task, theirs in ((CommonWords(haystack=str(tmp_path / "book.txt")), cwe_utils), (FrequentWords(), fwe_utils)):
        text = task.make(100, random.Random(0), 2048)
        ours = text.prompt.before + text.context + text.prompt.question + " " + text.prompt.begun
        assert ours.endswith(theirs.TEMPLATE.format(context=text.context, query=""))
        assert task.new_tokens == theirs.CONFIG["tokens_to_generate"]
    assert isinstance(Tokenizer.of(None), Tokenizer)
    assert task_of("vt").new_tokens == 30
