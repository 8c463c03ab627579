"""Bridges to torch's module: the same outputs, both ways, and reasons where there is no way."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod, l1_unstructured

from regard import Causal, ProblemError, RefusalError, Window, attend
from regard.describe.position import Rope
from regard.nn import MultiHeadAttention, from_torch, from_torch_masks, share_heads, to_latent, to_torch

BATCH, TOKENS, CONTEXT, WIDTH, HEADS = 2, 7, 5, 15, 3


def theirs_of(**words: Any) -> nn.MultiheadAttention:
    """Torch's module, its biases drawn as well: they are made as zeros."""
    module = nn.MultiheadAttention(WIDTH, HEADS, **({"batch_first": True} | words))
    for name, p in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(p)
    return module


def seen_by_all(hidden: Tensor) -> Tensor:
    """With key 0 never hidden: a row that sees nothing is NaN in torch's module."""
    return torch.cat([torch.zeros_like(hidden[..., :1]), hidden[..., 1:]], dim=-1)


@st.composite
def theirs_and_masks(draw: st.DrawFn) -> tuple[nn.MultiheadAttention, Tensor, dict[str, Any]]:
    torch.manual_seed(draw(st.integers(0, 999)))
    maybe, cross = st.booleans(), draw(st.sampled_from([None, WIDTH, 11]))
    width = {} if cross in (None, WIDTH) else {"kdim": cross, "vdim": cross}
    module = theirs_of(bias=draw(maybe), add_zero_attn=draw(maybe), **width)
    keys = TOKENS if cross is None else CONTEXT
    rows = draw(st.sampled_from([None, (TOKENS, keys), (BATCH * HEADS, TOKENS, keys)]))
    masks: dict[str, Any] = {"attn_mask": None, "key_padding_mask": None}
    is_float = draw(maybe)  # torch warns where one is of bools and the other of floats
    if rows is not None:
        masks["attn_mask"] = torch.randn(rows) if is_float else seen_by_all(torch.rand(rows) < 0.5)
    if draw(maybe):
        hidden = seen_by_all(torch.rand(BATCH, keys) < 0.5)
        masks["key_padding_mask"] = torch.randn(BATCH, keys) if is_float else hidden
    return module, torch.randn(BATCH, keys, width.get("kdim", WIDTH)) if cross else torch.empty(0), masks


@settings(max_examples=100)
@given(theirs_and_masks())
def test_from_torch_and_back_gives_the_same_outputs(drawn: tuple[nn.MultiheadAttention, Tensor, dict[str, Any]]):
    theirs, context, masks = drawn
    x = torch.randn(BATCH, TOKENS, WIDTH)
    source = context if context.numel() else x
    truth, _ = theirs(x, source, source, need_weights=False, **masks)
    ours = from_torch(theirs)
    mask, bias = from_torch_masks(**masks, heads=HEADS)
    found = ours(x, context if context.numel() else None, mask=mask, bias=bias)
    assert torch.allclose(found, truth, atol=1e-6)
    again, _ = to_torch(ours)(x, source, source, need_weights=False, **masks)
    assert torch.allclose(again, truth, atol=1e-6)


@pytest.mark.parametrize("without", ["q", "k", "v", "qk", "kv"])
def test_an_input_without_a_bias_has_one_of_zeros_in_torch(without: str):
    ours, x = from_torch(theirs_of()), torch.randn(BATCH, TOKENS, WIDTH)
    for letter in without:
        getattr(ours, f"{letter}_proj").bias = None
    torch.testing.assert_close(to_torch(ours)(x, x, x)[0], ours(x), rtol=1e-5, atol=1e-5)


def test_biases_of_some_inputs_and_none_of_the_output_are_refused():
    ours = MultiHeadAttention(WIDTH, HEADS, qkv_bias=True)
    ours.q_proj.register_parameter("bias", None)
    with pytest.raises(RefusalError, match="both biases or neither"):
        to_torch(ours)


@pytest.mark.parametrize("batch_first", [True, False])
def test_either_layout_comes_and_goes(batch_first: bool):
    theirs, x = theirs_of(batch_first=batch_first), torch.randn(BATCH, TOKENS, WIDTH)
    ours = from_torch(theirs)
    laid_out = x if batch_first else x.transpose(0, 1)
    truth = theirs(laid_out, laid_out, laid_out)[0]
    assert torch.allclose(ours(x), truth if batch_first else truth.transpose(0, 1), atol=1e-6)
    back = to_torch(ours, batch_first=batch_first)
    assert back.batch_first == batch_first
    assert torch.equal(back(laid_out, laid_out, laid_out)[0], truth)


def test_every_weight_comes_back():
    for words in ({}, {"bias": False}, {"kdim": 11, "vdim": 11}, {"add_zero_attn": True, "dropout": 0.25}):
        theirs = theirs_of(**words).eval()
        back = to_torch(from_torch(theirs))
        assert {n: p.shape for n, p in theirs.named_parameters()} == {n: p.shape for n, p in back.named_parameters()}
        assert all(torch.equal(p, q) for p, q in zip(theirs.parameters(), back.parameters(), strict=True))
        assert (back.dropout, back.add_zero_attn, back.training) == (theirs.dropout, theirs.add_zero_attn, False)


def test_the_weights_are_copies():
    theirs, x = theirs_of(), torch.randn(BATCH, TOKENS, WIDTH)
    ours = from_torch(theirs)
    before = ours(x)
    nn.init.zeros_(theirs.in_proj_weight)
    assert torch.equal(ours(x), before)


def test_types_and_devices_are_kept():
    ours = from_torch(theirs_of(dtype=torch.float64, device="meta"))
    assert {(p.dtype, str(p.device)) for p in ours.parameters()} == {(torch.float64, "meta")}
    assert to_torch(ours).out_proj.weight.is_meta


def test_a_key_of_zeros_is_a_sink_that_learns_nothing():
    ours = from_torch(theirs_of(add_zero_attn=True))
    assert ours.sinks is not None
    assert not ours.sinks.requires_grad
    assert ours.sinks.tolist() == [0, 0, 0]


def test_a_row_that_sees_nothing_is_nan_there_and_zero_here():
    """Zero out of attention, so the bias of the output projection."""
    theirs, x, hidden = theirs_of(), torch.randn(1, 2, WIDTH), torch.tensor([[True, True], [False, False]])
    mask, _ = from_torch_masks(hidden, heads=HEADS)
    ours, truth = from_torch(theirs)(x, mask=mask), theirs(x, x, x, attn_mask=hidden)[0]
    assert truth[0, 0].isnan().all()
    assert torch.equal(ours[0, 0], theirs.out_proj.bias)
    assert torch.allclose(ours[0, 1], truth[0, 1], atol=1e-6)


def test_a_mask_of_one_batch_row_may_leave_the_batch_out():
    q, hidden = torch.randn(1, 3, 5, 8), torch.tensor([False, True, False, True, True])
    mask, bias = from_torch_masks(torch.zeros(5, 5), hidden, heads=3)
    assert torch.allclose(attend(q, q, q, mask=mask, bias=bias), attend(q, q[:, :, [0, 2]], q[:, :, [0, 2]]), atol=1e-6)


def test_masks_of_other_shapes_are_named():
    with pytest.raises(ProblemError, match=r"attn_mask has shape \[4, 5, 5\].*heads=3"):
        from_torch_masks(torch.zeros(4, 5, 5), heads=3)
    with pytest.raises(ProblemError, match=r"key_padding_mask is torch.int64 \[2, 5\].*\[batch, keys\]"):
        from_torch_masks(None, torch.zeros(2, 5, dtype=torch.int64), heads=3)
    with pytest.raises(ProblemError, match=r"attn_mask is list: expected a tensor \[queries, keys\]"):
        from_torch_masks([[True]], heads=3)
    with pytest.raises(ProblemError, match="heads is 0: expected at least 1 heads"):
        from_torch_masks(torch.zeros(4, 5, 5), heads=0)
    assert from_torch_masks(heads=3) == (None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [({"add_bias_kv": True}, r"add_bias_kv=True: a learned key"), ({"kdim": 11, "vdim": 13}, r"kdim=11 and vdim=13")],
)
def test_what_is_unknown_here_is_refused(words: dict[str, Any], message: str):
    with pytest.raises(RefusalError, match=message):
        from_torch(theirs_of(**words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"kv_heads": 1}, "kv_heads=1"),
        ({"head_dim": 4}, "head_dim=4.* 5 wide"),
        ({"qkv_bias": True}, "both biases or neither"),
        ({"position": Rope(5 - 1), "head_dim": 4}, r"position=Rope\(dim=4\)"),
        ({"mask": Causal() & Window(3)}, r"mask=Causal\(\) & Window\(left=3\).*pass a mask to its forward"),
        ({"scale": 0.5}, r"scale=0\.5"),
        ({"softcap": 5.0}, r"softcap=5\.0"),
        ({"qk_norm": True, "gate": True}, r"(?s)qk_norm=True.*gate=True"),
        ({"sink": True}, "sink=True"),
    ],
)
def test_what_torch_cannot_do_is_refused(words: dict[str, Any], message: str):
    with pytest.raises(RefusalError, match=message):
        to_torch(MultiHeadAttention(WIDTH, HEADS, **words))


def test_a_subclass_with_a_forward_of_its_own_is_refused():
    class Doubled(nn.MultiheadAttention):
        def forward(self, query: Tensor, *others: Any, **words: Any) -> Any:
            return super().forward(2 * query, *others, **words)

    class Named(nn.MultiheadAttention):
        pass

    with pytest.raises(RefusalError, match=r"Doubled has a forward of its own"):
        from_torch(Doubled(WIDTH, HEADS))
    assert isinstance(from_torch(Named(WIDTH, HEADS)), MultiHeadAttention)
    replaced = theirs_of()
    replaced.forward = Doubled(WIDTH, HEADS).forward
    with pytest.raises(RefusalError, match=r"MultiheadAttention has a forward of its own"):
        from_torch(replaced)


class Adapted(nn.Linear):
    """A projection with a low-rank adapter, which its weight does not contain."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name of nn.Linear
        return super().forward(input) + input.sum(-1, keepdim=True)


@pytest.mark.parametrize("convert", [to_torch, partial(to_latent, kv_rank=6), partial(share_heads, kv_heads=1)])
def test_projections_that_are_more_than_their_weights_are_refused(convert: Callable[[MultiHeadAttention], Any]):
    adapted, hooked = MultiHeadAttention(WIDTH, HEADS), MultiHeadAttention(WIDTH, HEADS)
    adapted.v_proj = Adapted(WIDTH, WIDTH, bias=False)
    del adapted.v_proj.bias  # as wrappers have none
    with pytest.raises(RefusalError, match="v_proj is a Adapted with a forward of its own: merge the adapter first"):
        convert(adapted)
    hook = hooked.v_proj.register_forward_hook(lambda _, inputs, out: 2 * cast(Tensor, out))
    with pytest.raises(RefusalError, match=r"v_proj has a forward hook, .* remove the hook first"):
        convert(hooked)
    hook.remove()
    convert(hooked)
    hooked.k_proj.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    with pytest.raises(RefusalError, match=r"k_proj has a forward hook, .* remove the hook first"):
        convert(hooked)


@pytest.mark.parametrize("convert", [to_torch, partial(to_latent, kv_rank=6), partial(share_heads, kv_heads=1)])
def test_a_projection_whose_forward_was_replaced_is_refused(convert: Callable[[MultiHeadAttention], Any]):
    module = MultiHeadAttention(WIDTH, HEADS)
    before = module.k_proj.forward
    module.k_proj.forward = lambda input: 2 * before(input)  # noqa: A006  # the name of nn.Linear
    with pytest.raises(RefusalError, match="k_proj has a forward other than that of its class"):
        convert(module)
    module.k_proj.forward = module.v_proj.forward
    with pytest.raises(RefusalError, match="k_proj has a forward other than that of its class"):
        convert(module)
    module.k_proj.forward = before  # as accelerate does when its hooks are removed
    convert(module)


@pytest.mark.parametrize(
    "change", [nn.utils.parametrizations.weight_norm, partial(l1_unstructured, name="weight", amount=0.5)]
)
def test_a_weight_that_is_computed_is_converted_as_it_is(change: Callable[[nn.Linear], Any]):
    ours, x = MultiHeadAttention(WIDTH, HEADS), torch.randn(BATCH, TOKENS, WIDTH)
    change(ours.k_proj)
    truth = ours(x)
    assert torch.allclose(to_torch(ours)(x, x, x)[0], truth, atol=1e-6)
    assert torch.allclose(to_latent(ours, kv_rank=WIDTH).module(x), truth, atol=1e-5)


@pytest.mark.parametrize("change", [nn.utils.spectral_norm, partial(l1_unstructured, name="weight", amount=0.5)])
def test_a_weight_whose_parameters_changed_since_the_last_call_is_converted_as_it_is_now(
    change: Callable[[nn.Linear], Any],
):  # fmt: skip
    ours, x = from_torch(theirs_of()).eval(), torch.randn(BATCH, TOKENS, WIDTH)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        change(getattr(ours, name))
    ours(x)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.randn_like(p))
    latent, theirs = to_latent(ours, kv_rank=WIDTH).module, to_torch(ours)
    torch.testing.assert_close(theirs(x, x, x)[0], ours(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(latent(x), ours(x), rtol=1e-3, atol=1e-3)


def test_torchs_weight_is_that_of_now():
    theirs, x = theirs_of(), torch.randn(BATCH, TOKENS, WIDTH)
    pruned(theirs, "in_proj_weight")
    with torch.no_grad():
        theirs.in_proj_weight_orig.mul_(3)
    ours = from_torch(theirs)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0], rtol=1e-4, atol=1e-4)


def pruned(module: nn.Module, name: str) -> None:
    l1_unstructured(module, name, amount=0.5)


class EverySecond(BasePruningMethod):
    """Prune every second weight."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Any:
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask


class Doubled(EverySecond):
    """A pruning method that changes the input of the module, too."""

    def __call__(self, module: nn.Module, inputs: Any) -> Any:
        super().__call__(module, inputs)
        return (2 * inputs[0],)


def test_a_pruning_method_of_a_user_computes_the_weight_alone():
    ours, x = MultiHeadAttention(WIDTH, HEADS), torch.randn(BATCH, TOKENS, WIDTH)
    EverySecond.apply(ours.k_proj, "weight")
    truth = ours(x)
    assert torch.allclose(to_torch(ours)(x, x, x)[0], truth, atol=1e-6)
    assert torch.allclose(to_latent(ours, kv_rank=WIDTH).module(x), truth, atol=1e-5)
    with pytest.raises(RefusalError, match=r"heads are pooled in a plain weight: .* torch.nn.utils.prune.remove"):
        share_heads(ours, kv_heads=1)
    Doubled.apply(ours.q_proj, "weight")
    with pytest.raises(RefusalError, match=r"q_proj has a forward hook, .* remove the hook first"):
        to_torch(ours)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("change", [pruned, nn.utils.parametrizations.weight_norm])
def test_a_weight_that_is_computed_is_trained_if_its_parameters_are(
    change: Callable[[nn.Module, str], Any], trained: bool
):  # fmt: skip
    ours = MultiHeadAttention(WIDTH, HEADS, qkv_bias=True, out_bias=True)
    change(ours.q_proj, "weight")
    with torch.set_grad_enabled(not trained):
        ours(torch.randn(1, 2, WIDTH))  # computes the weight, which requires a gradient where it is not trained later
        for name, p in ours.named_parameters():
            p.requires_grad_(name.startswith("q_proj") and trained != (name == "q_proj.bias"))
        latent, theirs = to_latent(ours, kv_rank=WIDTH).module, to_torch(ours)
    assert latent.q_proj is not None
    assert (latent.q_proj.weight.requires_grad, latent.q_proj.bias.requires_grad) == (trained, not trained)
    assert (theirs.in_proj_weight.requires_grad, theirs.in_proj_bias.requires_grad) == (trained, not trained)


@pytest.mark.parametrize("trained", [True, False])
def test_weights_of_torch_that_are_computed_are_trained_if_their_parameters_are(trained: bool):
    theirs = theirs_of()
    pruned(theirs, "in_proj_weight")
    with torch.set_grad_enabled(not trained):
        theirs(*[torch.randn(1, 2, WIDTH)] * 3)
    for name, p in theirs.named_parameters():
        p.requires_grad_(trained == name.startswith("in_proj_weight"))
    ours = from_torch(theirs)
    assert [p.weight.requires_grad for p in (ours.q_proj, ours.k_proj, ours.v_proj)] == [trained] * 3
    assert [p.requires_grad for p in (ours.k_proj.bias, ours.o_proj.weight)] == [not trained] * 2


def test_what_was_frozen_stays_frozen():
    theirs = torch.nn.MultiheadAttention(32, 4).requires_grad_(False)
    assert not any(p.requires_grad for p in from_torch(theirs).parameters())


@pytest.mark.parametrize("width", [{}, {"kdim": 11, "vdim": 11}])
@pytest.mark.parametrize("trained", ["bias", "weight", "out_proj", "in_proj"])
def test_weights_and_biases_are_trained_as_before(trained: str, width: dict[str, int]):
    theirs = theirs_of(**width)
    for name, p in theirs.named_parameters():
        p.requires_grad_(trained in name)
    ours = from_torch(theirs)
    sources = {"o_proj.weight": "out_proj.weight", "o_proj.bias": "out_proj.bias"}
    sources |= {f"{name}_proj.bias": "in_proj_bias" for name in "qkv"}
    sources |= {f"{name}_proj.weight": f"{name}_proj_weight" if width else "in_proj_weight" for name in "qkv"}
    before = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        assert p.requires_grad == before[sources[name]].requires_grad
    back = to_torch(ours)
    assert {n: p.requires_grad for n, p in back.named_parameters()} == {n: p.requires_grad for n, p in before.items()}


def test_a_module_of_another_kind_is_refused_by_name():
    for convert in (from_torch, to_torch):
        with pytest.raises(ProblemError, match="got Linear"):
            convert(torch.nn.Linear(3, 3))
    with pytest.raises(ProblemError, match="from_torch makes one of torch's"):
        share_heads(torch.nn.MultiheadAttention(32, 4), 2)
