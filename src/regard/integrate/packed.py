"""Packed sequences that a call names by where they begin and end, `cu_seq_lens_q` and `cu_seq_lens_k`.

transformers' flash attention computes each sequence by itself then: collators pass the numbers (transformers'
`DataCollatorWithFlattening`, TRL's with `padding_free`), and models pass them on. Masks know of packed sequences by
`position_ids` alone, and neither beside a cache or an `attention_mask`, nor in models that give their masks no
positions (OPT, gpt-oss, ModernBERT). So the sequences of these numbers are kept apart besides what the mask says.
"""

from typing import cast

import torch
from torch import Tensor

from regard.describe.mask_by_rule import Causal
from regard.describe.not_a_spec import received
from regard.errors import ProblemError, RefusalError
from regard.integrate.layer_mask import LayerMask
from regard.torch_internals import version


def ids_of(q_ends: Tensor, k_ends: Tensor, batch: int, queries: int, keys: int) -> Tensor:
    """The sequence of each token, [batch, tokens], as transformers counts them: from 0.

    Args:
        q_ends: where the sequences begin and end in the rows of the batch, one after another: [sequences + 1], from 0.
        k_ends: the same of the keys.

    Raises:
        RefusalError: the keys are not those of the queries.
        ProblemError: numbers that are not of these tokens.
    """
    if not torch.compiler.is_compiling():
        _check(q_ends, k_ends, batch, queries, keys)
    at = torch.arange(batch * queries, dtype=q_ends.dtype, device=q_ends.device)
    return torch.searchsorted(q_ends[1:].contiguous(), at, right=True).reshape(batch, queries)


def _check(q_ends: Tensor, k_ends: Tensor, batch: int, queries: int, keys: int) -> None:
    for name, ends in (("cu_seq_lens_q", q_ends), ("cu_seq_lens_k", k_ends)):
        if not isinstance(cast(object, ends), Tensor) or ends.ndim != 1 or ends.dtype not in (torch.int32, torch.int64):
            raise ProblemError(f"{name} is {received(ends)}: expected a tensor of int32 or int64, [sequences + 1].")
    if queries != keys or not (q_ends is k_ends or torch.equal(q_ends, k_ends)):
        raise RefusalError(
            f"cu_seq_lens_q and cu_seq_lens_k with {queries} queries and {keys} keys: regard takes packed sequences of "
            "this call's own tokens alone. Leave past_key_values out, and pass the same numbers for both."
        )
    ends = q_ends.tolist()
    if ends[:1] != [0] or ends[-1] != batch * queries or ends != sorted(ends):
        shown = f"{str(ends[:8])[:-1]}, ...]" if len(ends) > 8 else str(ends)
        raise ProblemError(
            f"cu_seq_lens_q is {shown} and the call has {batch} x {queries} tokens: expected where each packed "
            f"sequence begins, from 0 in increasing order, and {batch * queries} at the end."
        )


def kept_apart(
    mask: LayerMask | Tensor | None, q_ends: Tensor, k_ends: Tensor, sizes: tuple[int, int, int], is_causal: bool
) -> LayerMask | Tensor:
    """What the attention function was given as the mask, hiding the other sequences besides.

    The layers of a pass share a `LayerMask` and the numbers, which are read in the first layer only: on a GPU the host
    waits for them.

    Args:
        sizes: batch, queries and keys.
        is_causal: of a call without a mask.

    Raises:
        RefusalError, ProblemError: those of `ids_of`.
    """
    if not isinstance(mask, LayerMask) or torch.compiler.is_compiling():
        return _kept_apart(mask, ids_of(q_ends, k_ends, *sizes), is_causal)
    given, known = (version(q_ends), version(k_ends), sizes), mask.packed_by
    if known is None or known[0] is not q_ends or known[1] is not k_ends or known[2] != given:
        known = mask.packed_by = q_ends, k_ends, given, mask.within(ids_of(q_ends, k_ends, *sizes))
    return known[3]


def _kept_apart(mask: LayerMask | Tensor | None, ids: Tensor, is_causal: bool) -> LayerMask | Tensor:
    if mask is None:
        (batch, tokens), rule = ids.shape, Causal() if is_causal else None
        mask = LayerMask(rule, (batch, 1, tokens, tokens), 0, ids.device)
    if isinstance(mask, LayerMask):
        return mask.within(ids)
    same = (ids[:, None, :, None] == ids[:, None, None, :]).to(mask.device)
    if mask.is_floating_point():
        return mask.masked_fill(~same, float("-inf"))
    return mask & same if mask.dtype == torch.bool else mask  # of another type, which the caller refuses
