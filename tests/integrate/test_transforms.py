"""`torch.func` over models of transformers: each row gets what a call of its own gives."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from regard.integrate.transformers import use_regard
from tests.integrate.zoo import close, model, padding, tokens

NAMES = ["llama", "mistral", "gemma2", "gpt_oss", "llama4", "deepseek_v3", "bert", "bigbird_pegasus"]


def row_by_row(name: str, ids: Tensor, masks: Tensor) -> Tensor:
    """The logits of eager attention, a call for each row; then the model has regard's attention."""
    subject = model(name)
    subject.set_attn_implementation("eager")
    with torch.no_grad():
        rows = [subject(row[None], attention_mask=mask[None]).logits[0] for row, mask in zip(ids, masks, strict=True)]
    use_regard(subject)
    return torch.stack(rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:.*block_sparse")
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, in mixtures of experts
def test_vmap_maps_over_rows_and_their_padding(name: str):
    def logits(row: Tensor, mask: Tensor) -> Tensor:
        return model(name)(row[None], attention_mask=mask[None], use_cache=False).logits[0]

    ids = tokens()
    for side in ("left", "right", "hole"):
        masks = padding(side)
        eager, real = row_by_row(name, ids, masks), masks.bool()
        with torch.no_grad():
            once, twice = vmap(logits)(ids, masks), vmap(vmap(logits))(ids[None], masks[None])[0]
        assert close(once[real], eager[real]), side
        assert close(twice[real], eager[real]), side


def test_vmap_maps_over_masks_of_four_dimensions():
    ids, keep = tokens(), torch.rand(2, 1, 13, 13) < 0.5
    keep |= torch.eye(13, dtype=torch.bool)
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    eager = row_by_row("llama", ids, added)

    def logits(row: Tensor, mask: Tensor) -> Tensor:
        return model("llama")(row[None], attention_mask=mask[None], use_cache=False).logits[0]

    with torch.no_grad():
        assert close(vmap(logits)(ids, keep), eager)
        assert close(vmap(logits)(ids, added), eager)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_each_row_of_a_padded_batch_has_gradients_of_its_own(name: str):
    subject, ids, masks = model(name), tokens(), padding("left")
    weights = {label: weight.detach() for label, weight in subject.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor, mask: Tensor) -> Tensor:
        words: dict[str, Any] = {"attention_mask": mask[None], "use_cache": False}
        logits = functional_call(subject, weights, (row[None],), words).logits[0]
        return (logits * mask[:, None]).square().mean()

    subject.set_attn_implementation("eager")
    eager = [grad(loss)(weights, row, mask) for row, mask in zip(ids, masks, strict=True)]
    use_regard(subject)
    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, ids, masks)
    for label, of_rows in found.items():
        expected = torch.stack([of_row[label] for of_row in eager])
        assert torch.allclose(of_rows, expected, atol=1e-5 * max(1.0, float(expected.abs().max()))), label
