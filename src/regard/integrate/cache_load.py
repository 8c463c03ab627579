"""`load_cache`: a model's cache from the file that its `save` wrote."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from regard.integrate.cache import RegardCache
from regard.integrate.cache_file import check_ids, ids_of, read_cache
from regard.integrate.cache_options import CacheOptions
from regard.integrate.decoder import decoder_of


def load_cache(model: Any, path: str | os.PathLike[str], *, tokens: Tensor | None = None) -> RegardCache:
    """A cache that `cache.save(path, tokens)` wrote; it continues with the same bits, on the device of the model.

    Args:
        model: the model that the cache was made with, or its config. Of a model the weights are compared, a few
            elements of each, of a config only the config.
        path: of the file. No code in it is run.
        tokens: the ids of the text to continue, [batch, tokens] or [tokens]: it must begin with the tokens in the
            cache. None: not compared; `cache.ids` has them.

    Raises:
        ProblemError: no such file, a damaged one, one of another model, or of other tokens.

    ```
    >>> import tempfile, torch
    >>> from regard.integrate import regard_cache, use_regard
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=11, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> model = use_regard(model)
    >>> prompt, folder = torch.tensor([[1, 2, 3, 4, 5]]), tempfile.TemporaryDirectory()
    >>> cache = regard_cache(model)
    >>> with torch.no_grad():
    ...     out = model(prompt, cache=cache)                            # computed once
    >>> cache.save(f"{folder.name}/prompt.safetensors", prompt)
    >>> text = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])                    # that prompt, and a question
    >>> cache = load_cache(model, f"{folder.name}/prompt.safetensors", tokens=text)
    >>> cache.get_seq_length()
    5
    >>> out = model.generate(text, cache=cache, max_new_tokens=4, do_sample=False, eos_token_id=None)
    >>> folder.cleanup()

    ```
    """
    decoder = decoder_of(model)
    module = model if isinstance(model, nn.Module) else None
    device = torch.device("cpu") if module is None else next(module.parameters()).device
    (options, state), ids = read_cache(path, decoder.config, module, device)
    if tokens is not None:
        check_ids(path, ids, ids_of(tokens))
    cache = RegardCache(decoder, CacheOptions(*options))
    cache.__setstate__(state)
    cache.ids = ids
    cache.attach(model)
    return cache
