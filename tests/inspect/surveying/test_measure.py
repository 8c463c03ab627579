"""`measure`: some measures of every head of a model, a user's own among them."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import (
    CodeGenConfig,
    CodeGenModel,
    GPTJConfig,
    GPTJModel,
    M2M100Config,
    M2M100Model,
    NemotronHConfig,
    NemotronHModel,
    RobertaConfig,
    RobertaModel,
)

from regard.errors import ProblemError
from regard.inspect import Measure, measure, observe, survey
from regard.nn import Decoder
from tests.inspect.small import TEXT, llama, words


def two_back(tokens):
    return torch.arange(2, len(tokens)), torch.arange(len(tokens) - 2)


TWO_BACK = Measure.of_pattern("two_back", two_back)
KEYS = ["sink", "entropy", "induction", "best_shift", "copying", "value_weighted", "sink_output", "rarest_hits"]


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    return Decoder(97, 32, layers=2, heads=4)


def test_scores_are_those_of_a_survey():
    model, tokenizer = llama(), words()
    report = survey(model, tokenizer, TEXT, measures=KEYS, new_tokens=0, compare_eager=False)
    found = measure(model, TEXT, KEYS, tokenizer=tokenizer)
    assert list(found) == KEYS
    for key, measured in found.items():
        assert measured.value.shape == (3, 6), key
        for head in report.heads:
            value, chance, low, _ = head.score(key)
            assert measured.value[head.layer, head.head].item() == pytest.approx(value, abs=1e-6), key
            assert measured.chance[head.layer, head.head].item() == pytest.approx(chance, abs=1e-6), key
            own = measured.low[head.layer, head.head].item()
            assert own == pytest.approx(float("nan") if low is None else low, abs=1e-5, nan_ok=True) or low == 0, key
    at = found["best_shift"].at
    assert at is not None
    assert all(head.value("best_shift_at") == at[head.layer, head.head].item() for head in report.heads)


def test_rare_words_are_those_of_the_formula_in_the_report(decoder):
    ids = torch.randint(3, 97, (1, 11))
    found = measure(decoder, ids, "rare_word")["rare_word"]
    assert found.measure.formula.endswith("r_j = ln(1 + x_j)")
    rarities, seen = (1 + ids).double().log(), torch.ones(11, 11).tril()
    with torch.no_grad(), observe(decoder, lambda look: look.weights.dense().double()) as calls:
        decoder(ids)
    for value, call in zip(found.value, calls, strict=True):
        means = call.value @ rarities[0] - (seen.double() @ rarities[0]) / seen.sum(-1)
        torch.testing.assert_close(value, means.mean(-1)[0], atol=1e-5, rtol=0)


def test_a_survey_takes_a_measure_of_the_user():
    made = survey(llama(), words(), TEXT, measures=["sink", TWO_BACK], new_tokens=0, compare_eager=False)
    assert "two_back" in made.measures
    assert made.to_dict()["definitions"]["two_back"]["source"] == "a pattern of the user"
    assert "two_back_low" in made.to_csv().splitlines()[0].split(",")
    found = measure(llama(), TEXT, TWO_BACK, tokenizer=words())["two_back"]
    name, value = found.top(1)[0]
    assert made.head(name).value("two_back") == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("key", ["positional", "column"])
def test_the_best_of_several_texts_is_that_of_most_of_them(decoder, key):
    """Not that of the first one, which is another in some heads."""
    first, other = torch.randint(97, (2, 31))
    alone, of_other = (measure(decoder, ids, key)[key].at for ids in (first, other))
    assert not torch.equal(alone, of_other)
    assert torch.equal(measure(decoder, torch.stack([first, other, other]), key)[key].at, of_other)
    assert torch.equal(measure(decoder, torch.stack([first, other]), key)[key].at, alone)


def test_a_pattern_is_the_mass_on_its_pairs(decoder):
    """Of pairs, of the same pairs as a matrix, and by the dense weights."""
    ids = torch.randint(97, (2, 23))
    by_matrix = Measure.of_pattern("matrix", lambda tokens: torch.ones(23, 23).tril(-2).triu(-2) > 0)
    found = measure(decoder, ids, [TWO_BACK, by_matrix])
    assert torch.equal(found["two_back"].value, found["matrix"].value)
    with torch.no_grad(), observe(decoder, lambda look: look.weights.dense()) as seen:
        decoder.eval()(ids)
    for layer, of in enumerate(seen):
        expected = of.value.diagonal(-2, dim1=2, dim2=3).mean(-1).mean(0)
        torch.testing.assert_close(found["two_back"].value[layer], expected.double(), atol=1e-6, rtol=0)
    assert found["two_back"].chance[0, 0].item() == pytest.approx(sum(1 / (i + 1) for i in range(2, 23)) / 21)


def test_pairs_that_a_pattern_names_twice_count_once(decoder):
    ids = torch.arange(23)
    twice = Measure.of_pattern("twice", lambda tokens: tuple(side.repeat(2) for side in two_back(tokens)))
    found = measure(decoder, ids, [TWO_BACK, twice])
    torch.testing.assert_close(found["twice"].value, found["two_back"].value)


def test_a_pattern_may_be_defined_on_repeats(decoder):
    def same(tokens):
        return (tokens[:, None] == tokens).tril(-1)

    own = Measure.of_pattern("same", same, on="repeats")
    found = measure(decoder, torch.arange(9), [own, "duplicate"])
    torch.testing.assert_close(found["same"].value, found["duplicate"].value, atol=1e-6, rtol=0)


def test_layers_and_modes(decoder):
    decoder.train()
    found = measure(decoder, torch.arange(9), "sink", layers=[1])["sink"]
    assert found.layers == (1,)
    assert decoder.training
    decoder.eval()


def test_a_layer_by_its_number_is_a_list_of_one(decoder):
    assert measure(decoder, torch.arange(9), "sink", layers=1)["sink"].layers == (1,)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([0, 7], r"^layers has 7, which did not attend: only 0-1 did\.$"),
        ([-1], "^layers has -1, which did not attend"),
        ([], "^layers is empty: name the layers to measure, or None for all"),
        ("1", "^layers is '1': expected layer numbers"),
        ([True], "^layers has True: expected layer numbers"),
    ],
)
def test_layers_that_do_not_exist_are_refused(decoder, layers, message):
    with pytest.raises(ProblemError, match=message):
        measure(decoder, torch.arange(9), "sink", layers=layers)


def test_what_is_shown_is_short(decoder):
    found = measure(decoder, torch.arange(9), ["sink"])["sink"]
    long = replace(found, value=torch.rand(30, 9))
    assert repr(long).startswith("Measured(measure=Measure(key='sink', unit='mass'), value=float32 [30, 9], chance=")
    assert found._repr_html_().count("<tr>") == 1 + 8
    name, value = found.top(1)[0]
    layer, head = map(int, name.split("."))
    assert found.value[layer, head].item() == value == found.value.max().item()


@pytest.mark.parametrize(
    ("text", "measures", "message"),
    [
        ("a text", ["sink"], "text_or_ids is a text and there is no tokenizer"),
        (torch.tensor([3]), ["sink"], r"the text is \[1, 1\] tokens"),
        (torch.arange(9), ["sinks"], "measures has 'sinks': expected some of sink, "),
        (torch.arange(9), 3, "measures is 3: expected a list"),
        (torch.arange(9), [Measure.of_pattern("p", lambda t: t)], r"pattern returned torch.int64 \[9\] for 9 tokens"),
        (torch.arange(9), [Measure.of_pattern("p", lambda t: (t, t + 1))], "integers .* from 0 to 8"),
    ],
)
def test_what_makes_no_sense_is_refused(decoder, text, measures, message):
    with pytest.raises(ProblemError, match=message):
        measure(decoder, text, measures)


@pytest.mark.parametrize("text", ["a text", [1, 2, 3]])
def test_the_name_of_a_model_is_no_model(text):
    with pytest.raises(ProblemError, match="model is str: expected a"):
        measure("gpt2", text, "sink")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, two_back), "^key is 3: expected a text"),
        (("", two_back), "^key is '': expected a text"),
        (("back", None), r"^pattern is None: expected a function of the tokens .* \(queries, keys\)"),
        (("back", "induction"), "^pattern is 'induction': expected a function"),
    ],
)
def test_a_pattern_is_a_function_with_a_key(arguments, message):
    with pytest.raises(ProblemError, match=message):
        Measure.of_pattern(*arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"on": "repeat"}, "^on is 'repeat': expected one of 'text', 'repeats', 'jittered repeats'"),
        ({"label": 3}, "^label is 3: expected a text"),
        ({"compute": 3}, "^compute is 3: expected a function of Inputs"),
        ({"needs": "tokens"}, "^needs is 'tokens': expected a frozenset"),
        ({"needs": frozenset({"token"})}, r"^needs is frozenset\({'token'}\): expected a frozenset of some of"),
    ],
)
def test_the_fields_of_a_measure_are_checked(fields, message):
    with pytest.raises(ProblemError, match=message):
        replace(TWO_BACK, **fields)


def test_a_text_is_read_by_the_tokenizer_that_was_loaded_with_the_model(tmp_path):
    from regard.integrate import load

    llama().save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    model, tokenizer, _ = load(str(tmp_path))
    found, expected = measure(model, TEXT, "sink"), measure(model, TEXT, "sink", tokenizer=tokenizer)
    assert torch.equal(found["sink"].value, expected["sink"].value)


@pytest.mark.parametrize("key", ["sink", "best_offset_at", "delta_loss"])
def test_a_key_of_the_library_is_not_given_to_another_measure(decoder, key):
    own = Measure.of_pattern(key, two_back)
    with pytest.raises(ProblemError, match=f"one of your own named '{key}'.*: give it another key"):
        survey(llama(), words(), TEXT, measures=[own])
    with pytest.raises(ProblemError, match=f"one of your own named '{key}'.*: give it another key"):
        measure(decoder, torch.arange(9), [own, "sink"])


def test_two_measures_do_not_share_a_key(decoder):
    other = Measure.of_pattern("two_back", lambda tokens: two_back(tokens)[::-1])
    with pytest.raises(ProblemError, match="several of your own named 'two_back': give each a key of its own"):
        measure(decoder, torch.arange(9), [TWO_BACK, other])
    with pytest.raises(ProblemError, match="several of your own named 'two_back'"):
        survey(llama(), words(), TEXT, measures=[TWO_BACK, other])
    assert list(measure(decoder, torch.arange(9), [TWO_BACK, TWO_BACK])) == ["two_back"]


def test_texts_may_be_what_a_tokenizer_returns():
    model, tokenizer, texts = llama(), words(), ["the cat", "the dog"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert len(ids[0]) == len(ids[1]) > 1
    expected = measure(model, ids, "entropy")["entropy"].value
    for given in (texts, tokenizer(texts), tokenizer(texts, return_tensors="pt"), {"input_ids": ids}):
        assert torch.equal(measure(model, given, "entropy", tokenizer=tokenizer)["entropy"].value, expected)
    alone = measure(model, ids[0], "entropy")["entropy"].value
    assert torch.equal(measure(model, tokenizer(texts[0]), "entropy")["entropy"].value, alone)


def test_texts_of_several_lengths_are_refused(decoder: Decoder):
    tokenizer, texts = words(), ["the cat sat", "the dog"]
    with pytest.raises(ProblemError, match=r"^the texts have \d+ to \d+ tokens: give texts with the same number"):
        measure(decoder, texts, "sink", tokenizer=tokenizer)
    for ids in ([[1, 2, 3], [4, 5]], {"input_ids": [[1, 2, 3], [4, 5]]}):
        with pytest.raises(ProblemError, match=r"^the texts have 2 to 3 tokens: give texts with the same number"):
            measure(decoder, ids, "sink")
    with pytest.raises(ProblemError, match="text_or_ids has padding, by its attention_mask"):
        measure(decoder, {"input_ids": [[1, 2, 3], [0, 4, 5]], "attention_mask": [[1, 1, 1], [0, 1, 1]]}, "sink")
    with pytest.raises(ProblemError, match=r"^text_or_ids has pixels: expected input_ids"):
        measure(decoder, {"pixels": [[1, 2, 3]]}, "sink")
    with pytest.raises(ProblemError, match="text_or_ids is a text and there is no tokenizer"):
        measure(decoder, texts, "sink")


def test_no_measures_and_no_tokens_are_refused(decoder: Decoder):
    with pytest.raises(ProblemError, match=r"^measures is empty: name some, such as \['sink', 'induction'\]"):
        measure(decoder, torch.arange(1, 9), [])
    with pytest.raises(ProblemError, match=r"^the text is \[1, 0\] tokens: expected .* 2 tokens or more"):
        measure(decoder, [], ["sink"])
    for model in (decoder, llama()):
        with pytest.raises(ProblemError, match=r"^the text is \[0, 9\] tokens: expected .* a batch of 1 or more"):
            measure(model, torch.ones(0, 9, dtype=torch.int64), ["sink"])


@pytest.mark.parametrize("wrong", [4_321, -2])
def test_ids_that_the_model_does_not_have_are_refused(decoder: Decoder, wrong: int):
    for model in (decoder, llama()):
        with pytest.raises(ProblemError, match=rf"^the text has token id {wrong}, and the model has ids 0 to \d+: "):
            measure(model, [1, 2, wrong], ["sink"])


@pytest.mark.parametrize("own", [[1, 2, 3], [1, 2, 4_321]], ids=str)
def test_an_error_of_the_model_is_its_own(decoder: Decoder, own: list[int]):
    def fail(module: object, arguments: object):
        raise IndexError("of the model") if max(own) < 10 else KeyError("of the model")

    hook = decoder.body.register_forward_pre_hook(fail)
    with pytest.raises((IndexError, KeyError), match="of the model"):
        measure(decoder, own, ["sink"])
    hook.remove()


def test_a_text_longer_than_learned_positions_is_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = RobertaModel(RobertaConfig(vocab_size=50, max_position_embeddings=12, **sizes))
    assert measure(model, torch.arange(2, 12), ["sink"])["sink"].value.shape == (1, 2)
    with pytest.raises(ProblemError, match="11 tokens, and the model has a table of 10 positions: shorten it to 10 t"):
        measure(model, torch.arange(2, 13), ["sink"])


GPTJ = {"vocab_size": 50, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 4}
M2M100 = {
    "vocab_size": 50, "max_position_embeddings": 12, "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_layers": 1, "decoder_attention_heads": 2,
}  # fmt: skip
NEMOTRON = {
    "vocab_size": 50, "max_position_embeddings": 12, "hidden_size": 16, "intermediate_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "layers_block_type": ["attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "ends"),
    [
        (lambda: GPTJModel(GPTJConfig(**GPTJ)), True),
        (lambda: CodeGenModel(CodeGenConfig(**GPTJ)), True),
        (lambda: NemotronHModel(NemotronHConfig(**NEMOTRON)), False),
        (lambda: M2M100Model(M2M100Config(**M2M100)), False),
    ],
    ids=["GPT-J, a buffer", "CodeGen, a buffer", "Nemotron-H, no positions", "M2M100, a table that becomes longer"],
)
def test_only_a_text_longer_than_a_table_of_positions_is_refused(model, ends):
    made = model()
    assert measure(made, torch.arange(5, 17), ["sink"])["sink"].value.shape[0] == 1
    with pytest.raises(ProblemError, match="has a table of 12 positions") if ends else nullcontext():
        measure(made, torch.arange(5, 18), ["sink"])
