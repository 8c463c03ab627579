"""The model of a survey: its sizes, running it, and restoring it afterwards."""

import inspect
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.integrate.cache_argument import as_argument, cache_of
from regard.integrate.evaluation_mode import evaluating
from regard.integrate.model_folder import calls_per_layer
from regard.integrate.position_tables import context_of, has_position_table
from regard.integrate.switch_implementation import keeping_implementation, with_implementation


@dataclass(frozen=True, eq=False)
class SurveyedModel:
    """A model of transformers; for an encoder-decoder, its encoder."""

    model: Any

    @property
    def generates(self) -> bool:
        """Whether it generates text."""
        return bool(self.model.can_generate())

    @property
    def body(self) -> Any:
        """The model without its language-model head, whose logits of a long text take more memory than the model."""
        return self.model.base_model

    @property
    def context(self) -> int | None:
        """The positions that it was trained on; None for no known limit."""
        return context_of(self.model)

    @property
    def extrapolates(self) -> bool:
        """Whether it runs beyond its `context`: it has no table of positions that ends there."""
        return not has_position_table(self.model)

    @property
    def layers(self) -> int:
        """The number of layers in its config, 1 if the config has none."""
        return layers_of(self.model.config) or 1

    @property
    def layers_known(self) -> bool:
        """Whether its config gives the number of layers."""
        return layers_of(self.model.config) is not None

    @property
    def embeddings(self) -> int:
        """Token ids that it has an embedding for."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def ends(self) -> set[int]:
        """The tokens that end a text."""
        ends = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)

    def run(self, ids: Tensor) -> Any:
        """Run its body on tokens, int64 [batch, tokens]."""
        return self.body(input_ids=ids)

    def outputs(self, ids: Tensor) -> Tensor:
        """The output for each token: logits, or hidden states of a model without a head; [1, tokens, ...]."""
        return self.model(input_ids=ids)[0]

    @property
    def output_name(self) -> str:
        """The name of `outputs`: "logits", or "hidden states"."""
        return "hidden states" if self.body is self.model else "logits"

    def step(self, ids: Tensor, cache: Any) -> tuple[int, Any]:
        """(the most likely next token, the KV cache): `ids` are the tokens that the cache does not have yet."""
        takes = inspect.signature(self.model.forward).parameters
        fewer = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        out = self.model(input_ids=ids, **as_argument(self.model, cache), use_cache=True, **fewer)
        return int(out.logits[0, -1].argmax()), cache_of(out)

    def attention(self, name: str) -> AbstractContextManager[None]:
        """Within the block the model uses another of transformers' attention implementations."""
        return with_implementation(self.model, name)


def layers_of(config: Any) -> int | None:
    """The number of layers in a config of transformers, each attention call counted as one; None if it has none."""
    layers = _number(config, "num_hidden_layers")
    return None if layers is None else layers * calls_per_layer(config.get_text_config().model_type)


def heads_of(config: Any) -> int | None:
    """The query heads of a layer in a config; None if it has no number, or several."""
    return _number(config, "num_attention_heads")


def _number(config: Any, name: str) -> int | None:
    number = getattr(config.get_text_config(), name, None)
    return number if isinstance(number, int) else None


def surveyed_model(model: Any) -> SurveyedModel:
    """The model in the form that a survey uses; the model itself does not change.

    Raises:
        ProblemError: it is no model of transformers.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ProblemError(f"model is {type(model).__name__}: expected a model of transformers (a PreTrainedModel).")
    return SurveyedModel(model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model)


@contextmanager
def prepared(model: Any) -> Generator[SurveyedModel]:
    """Within the block, the model has regard's attention and is in evaluation mode; it is restored afterwards.

    Raises:
        ProblemError: it is no model of transformers.
    """
    surveyed = surveyed_model(model)
    from regard.integrate.transformers import use_regard  # here: regard.inspect loads without transformers

    with evaluating(model), keeping_implementation(model):
        use_regard(model)
        yield surveyed


def settle(device: torch.device) -> None:
    """Wait until the accelerator has finished, so that a clock can be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
