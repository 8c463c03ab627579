"""The attention of transformers' models, computed by regard.

```python
model = AutoModelForCausalLM.from_pretrained(...)
use_regard(model)                      # or register(), then from_pretrained(..., attn_implementation="regard")
```

transformers (5.17 to 5.24) lets an attention function and a mask function be registered under a name: here those of
`attention_function.py` and `mask_function.py`.
"""

import inspect
from typing import Any, TypeVar, cast

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from regard.errors import ProblemError
from regard.integrate.attention_function import attention
from regard.integrate.implementation import INTERFACE, NAME, UNSUPPORTED, names_in_forward, not_supported
from regard.integrate.latent import pass_latents
from regard.integrate.mask_function import mask
from regard.integrate.switch_implementation import set_implementation

M = TypeVar("M")


def register() -> None:
    """Make `attn_implementation="regard"` known to transformers. Calling it twice changes nothing more.

    `use_regard` checks a model, and this name does not. A model that computes attention by itself raises `ProblemError`
    when it makes its first mask, if transformers makes its masks, and is otherwise as without the name; so does one of
    that kind with attention classes of your own, and its copies, until `use_regard` has seen them. A class that
    looks its attention up in a table of its own raises `KeyError: 'regard'` when it is made: GIT, SAM, SAM-HQ,
    DeepSeek-OCR-2 and Unlimited-OCR, which are made without the name for `use_regard(model)`; and Bark, Falcon,
    GPT-Neo, Data2Vec's for images and SuperGlue, which `use_regard` refuses as well.

    >>> register()
    >>> "regard" in AttentionInterface().valid_keys()
    True
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def use_regard(model: M) -> M:
    """Let regard compute the attention of a transformers model, from now on; returns the model.

    `model.set_attn_implementation("sdpa")` undoes it.

    Latent attention (MLA: DeepSeek-V3 and others) decodes without expanding the cached latents, with the caches of
    transformers as with regard's. `regard_cache(model).explain()` says so, or why not.

    ```
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=11, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> ids, eager = torch.tensor([[1, 2, 3]]), model(torch.tensor([[1, 2, 3]])).logits
    >>> model = use_regard(model)
    >>> torch.allclose(model(ids).logits, eager, atol=1e-6)
    True

    ```

    Raises:
        ProblemError: not a model of transformers, or one that computes attention by itself (bloom, falcon, mpt, ...).
        RefusalError: its attention chooses keys in a way that regard does not support (MiniMax-M3).
    """
    check_model(model)
    register()
    pass_latents(cast(Any, model))
    set_implementation(model, NAME)
    return model


def check_model(model: Any) -> None:
    """Raise an error unless it is a model of transformers whose attention function can be replaced.

    Raises:
        ProblemError: another object, or a model that computes attention by itself.
        RefusalError: its attention passes a keyword that regard does not support.
    """
    if not (isinstance(model, nn.Module) and hasattr(model, "set_attn_implementation")):
        raise ProblemError(
            f"use_regard(model) got {type(model).__name__}: expected a model of transformers (a PreTrainedModel). In a "
            "model of your own, call regard.attend."
        )
    uses = {kind: names_in_forward(kind) for kind in {type(module) for module in model.modules()}}
    uses = {kind: names for kind, names in uses.items() if INTERFACE in names[0]}
    if not uses:
        raise ProblemError(
            f"{type(model).__name__} computes its attention, if it has any, in its own file "
            f"({type(model).__module__}) and never asks transformers' AttentionInterface, so regard cannot replace it. "
            "Leave it as it is, or call regard.attend in a copy of its attention class (ALiBi is "
            "bias=regard.Alibi(heads), in Falcon with slopes=regard.Alibi(heads).slope_per_head() * head_dim ** -0.5)."
        )
    refused = UNSUPPORTED.keys() - inspect.signature(attention).parameters.keys()
    for kind, (_, keywords) in uses.items():
        for name in sorted(refused & keywords):
            raise not_supported(kind, name)
