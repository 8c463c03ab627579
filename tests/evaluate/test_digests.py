"""The digests by which a file of results knows its model: other weights, or another config, are another model."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from regard import Causal, Rope, Window
from regard.errors import ProblemError
from regard.evaluate import Passage, Recall, as_model, evaluate
from regard.evaluate.run import settings_of
from regard.nn import Decoder
from regard.rope import Linear

TASK = Recall(pairs=(8,), samples=1)
SIZES: Any = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.unembedding = nn.Embedding(256, 64), nn.Linear(64, 256)

    def forward(self, tokens):
        return self.unembedding(self.embedding(tokens))


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=512, **options))


def digest(model):
    return as_model(model).digest


@pytest.mark.parametrize("place", [(0, 0), (3, 1), (63, 63)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digest_of_weights_sees_every_element(place, dtype):
    model = Plain().to(dtype)
    before = digest(model)
    with torch.no_grad():
        model.embedding.weight[place] += 1
    assert digest(model) != before
    with torch.no_grad():
        model.embedding.weight[place] = 0.0
        before = digest(model)
        model.embedding.weight[place] = -0.0
    assert digest(model) != before


def test_the_digest_of_weights_is_of_their_elements_and_not_of_their_strides():
    model = Plain()
    other = copy.deepcopy(model)
    other.embedding.weight = nn.Parameter(model.embedding.weight.detach().T.contiguous().T)
    assert not other.embedding.weight.is_contiguous()
    assert digest(other) == digest(model)
    with torch.no_grad():
        other.embedding.weight[5, 7] += 1
    assert digest(other) != digest(model)


def with_extra_state():
    class Extra(Plain):
        extra = 1

        def get_extra_state(self):
            return {"extra": self.extra}

        def set_extra_state(self, state):
            self.extra = state["extra"]

    model = Extra()
    yield model
    model.extra = 2
    yield model


def with_buffer(change):
    for values in (torch.eye(3), 2 * torch.eye(3)):
        torch.manual_seed(0)
        model = Plain()
        model.register_buffer("odd", change(values))
        yield model


def quantised():
    for scale in (1, 2):
        torch.manual_seed(0)
        model = Plain()
        with torch.no_grad():
            model.unembedding.weight *= scale
        yield torch.ao.quantization.quantize_dynamic(model, {nn.Linear})  # pyright: ignore[reportDeprecated]


ODD = {
    "extra state": with_extra_state,
    "quantised": quantised,
    "coo": lambda: with_buffer(lambda x: x.to_sparse()),
    "csr": lambda: with_buffer(lambda x: x.to_sparse_csr()),
    "csc": lambda: with_buffer(lambda x: x.to_sparse_csc()),
    "qint8": lambda: with_buffer(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
    "jagged": lambda: with_buffer(lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)),
    "nested": lambda: with_buffer(lambda x: torch.nested.nested_tensor([x, x[:1]])),
    "parts": lambda: with_buffer(lambda x: TwoTensor(x, x)),
    "conjugate": lambda: with_buffer(lambda x: x.to(torch.complex64).conj()),
    "float8": lambda: with_buffer(lambda x: x.to(torch.float8_e4m3fn)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ODD,
)
def test_weights_that_are_no_dense_tensors_are_digested(name):
    found = [(digest(model), digest(model)) for model in ODD[name]()]
    assert found[0][0] == found[0][1] != found[1][0]
    evaluate(TASK, next(ODD[name]()))


def mistral(window):
    torch.manual_seed(0)
    return MistralForCausalLM(
        MistralConfig(**SIZES, max_position_embeddings=512, num_key_value_heads=2, sliding_window=window)
    )


def decoder(**options):
    torch.manual_seed(0)
    return Decoder(256, 32, 1, 4, **options)


def no_skips():
    model = decoder()
    model.body.blocks[0].skip = False
    return model


def activated(activation):
    torch.manual_seed(0)
    return nn.Sequential(Plain(), activation)


OTHERS = {
    "rope": lambda: (
        llama(),
        llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}),
    ),
    "window": lambda: (mistral(None), mistral(4)),
    "mask": lambda: (decoder(), decoder(mask=Causal() & Window(4))),
    "position": lambda: (decoder(position=Rope(8)), decoder(position=Rope(8, scaling=Linear(8)))),
    "skip": lambda: (decoder(), no_skips()),
    "activation": lambda: (activated(nn.ReLU()), activated(nn.GELU())),
}


@pytest.mark.parametrize("name", OTHERS)
def test_results_of_a_model_with_another_config_are_refused(tmp_path, name):
    one, other = OTHERS[name]()
    assert digest(one) == digest(other)
    first = evaluate(TASK, one, label="model", file=tmp_path / "results.jsonl")
    again = evaluate(TASK, one, label="model", file=tmp_path / "results.jsonl")
    assert again.records == first.records
    with pytest.raises(ProblemError, match=r'config is "\w+" there and "\w+" here. Name another file'):
        evaluate(TASK, other, label="model", file=tmp_path / "results.jsonl")


def test_the_config_of_a_model_is_the_same_after_it_is_saved_and_loaded(tmp_path):
    model = llama()
    before = settings_of(TASK, as_model(model, label="model"))
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert settings_of(TASK, as_model(loaded, label="model")) == before


@pytest.mark.parametrize(
    "model", [lambda tokens: torch.zeros(*tokens.shape, 256), Plain().forward], ids=["lambda", "method"]
)
def test_a_function_without_a_name_of_its_own_needs_a_label_for_a_file(tmp_path, model):
    with pytest.raises(ProblemError, match="label="):
        evaluate(TASK, model, file=tmp_path / "results.jsonl")
    assert not (tmp_path / "results.jsonl").exists()
    evaluate(TASK, model)
    evaluate(TASK, model, label="model", file=tmp_path / "results.jsonl")


@dataclass(frozen=True)
class Own:
    """A task of a user, with fields of any name."""

    name: ClassVar[str] = "own"
    axes: ClassVar[tuple[str, ...]] = ("part",)
    source: ClassVar[str] = "a test"
    text: Any = "abc"
    positions: Any = 1
    samples: int = 1
    seed: int = 0

    def examples(self, model):
        yield Passage("0", {"part": 0}, tuple(model.tokenizer.encode("some text")))


@pytest.mark.parametrize("name", ["text", "positions"])
def test_every_field_of_a_task_is_a_setting(tmp_path, name):
    evaluate(Own(), Plain(), file=tmp_path / "results.jsonl", label="model")
    model = as_model(Plain(), label="model")
    one, other = (settings_of(Own(**{name: value}), model) for value in (2, 3))
    assert one != other
    assert one["positions"] is None


@pytest.mark.parametrize("value", [np.int64(3), {1, 2}, torch.zeros(2), math.nan, (Path("x"),), b"x"])
def test_a_field_that_json_cannot_hold_is_named(tmp_path, value):
    with pytest.raises(ProblemError, match=r"text is .*: expected what JSON can hold"):
        evaluate(Own(text=value), Plain(), file=tmp_path / "results.jsonl")
    assert not (tmp_path / "results.jsonl").exists()
    evaluate(Own(text=value), Plain())


def test_a_number_that_a_module_computes_with_makes_another_model():
    one = Plain()
    other = copy.deepcopy(one)
    assert as_model(other).config == as_model(one).config
    vars(other)["temperature"] = 2.0
    assert as_model(other).config != as_model(one).config
