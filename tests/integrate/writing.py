"""Models that write: the ways to do it, and what came out."""

from typing import Any

import torch
from torch import Tensor

from regard.integrate.transformers import use_regard
from tests.integrate.zoo import model, tokens, with_cache

WAYS: dict[str, dict[str, Any]] = {
    "greedily": {},
    "with beams": {"num_beams": 3},
    "with beams, two of them returned": {"num_beams": 3, "num_return_sequences": 2},
    "by sampling": {"do_sample": True},
    "by sampling, three of each": {"do_sample": True, "num_return_sequences": 3},
    "by looking up the prompt": {"prompt_lookup_num_tokens": 3},
}


def written(m: Any, ids: Tensor, cache: Any, **options: Any) -> tuple[list[list[int]], Tensor]:
    """(tokens, logits [steps, rows, vocabulary]) that a model writes, always as many."""
    torch.manual_seed(5)
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    made = m.generate(ids, **with_cache(cache), output_logits=True, return_dict_in_generate=True, **settings)
    return made.sequences.tolist(), torch.stack(made.logits)


def prompt(rows: int = 2, length: int = 13) -> Tensor:
    """Tokens, the first few of which come again: for who looks up the prompt."""
    torch.manual_seed(7)
    ids = tokens(rows, length)
    if length >= 11:
        ids[:, 7:11] = ids[:, 1:5]
    return ids


def on_regard(name: str) -> Any:
    """A model whose attention regard computes."""
    use_regard(model(name))
    return model(name)
