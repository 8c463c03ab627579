"""`context_parallel`: models whose sequence is sharded over ranks, by one line around the call.

Inside the context, the outermost call of a model (of transformers, or of `regard.nn`) gets inputs of the whole sequence
on every rank. They are sharded by a layout, and the model runs over the tokens of its rank: `attend`, and torch's
`scaled_dot_product_attention`, are rings over all ranks, positions are those in the whole sequence, and so are masks.
"""

import inspect
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib import import_module
from threading import Lock
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from regard.calls import route_calls
from regard.describe.fingerprint import Fingerprint
from regard.describe.mask import Mask
from regard.errors import ProblemError, RefusalError
from regard.nn import Block, Decoder, Encoder, LatentAttention, MultiHeadAttention
from regard.nn.token_positions import tokens_at
from regard.parallel.gather import gathered, summed
from regard.parallel.layout import Layout
from regard.parallel.ranks import check_initialized
from regard.parallel.ring import ring_attend, ring_attend_state
from regard.plan.request import Request
from regard.state import State
from regard.torch_signature import scaled_dot_product_attention

Ranks = DeviceMesh | dist.ProcessGroup | None
LayoutName = str | Callable[[int, int], Layout]

LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
}
"""Besides "balanced", which needs the mask."""

_MODULES: tuple[type[nn.Module], ...] = (Decoder, Encoder, Block, MultiHeadAttention, LatentAttention)

M = TypeVar("M", bound=nn.Module)


class Shard:
    """A rank's part of one sequence.

    Attributes:
        layout: which tokens each rank has.
        rank: of this process, in the group.
        group: the ranks; None for all.
    """

    def __init__(self, layout: Layout, rank: int, group: dist.ProcessGroup | None) -> None:
        self.layout, self.rank, self.group = layout, rank, group

    @property
    def tokens(self) -> int:
        """The tokens of the whole sequence."""
        return self.layout.tokens

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 [tokens of this rank]: their positions in the sequence."""
        return torch.from_numpy(self.layout.indices(self.rank)).to(device)

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor of the whole sequence."""
        return self.layout.shard(tensor, self.rank, dim)

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The tensor of the whole sequence, on every rank, from the rank's own part; every rank calls it.

        Gradients flow to the rank's own part, for a loss of the whole tensor that every rank computes alike.
        """
        return gathered(tensor, self.layout, self.rank, self.group, dim)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, such as of a loss; its gradient is that of the rank's own part."""
        return summed(tensor, self.group)


class ContextParallel:
    """What `context_parallel` gives: the layout of the last sequence, and what shards tensors of your own.

    Attributes:
        shard: of the last sequence; None before the first.
    """

    def __init__(self, ranks: Ranks, layout: LayoutName | Layout, mask: Mask | None) -> None:
        if isinstance(ranks, DeviceMesh):
            if ranks.ndim != 1:
                names = ranks.mesh_dim_names or ()
                raise ProblemError(
                    f"a mesh of {ranks.ndim} dimensions {list(names)}: the sequence is sharded over one of them, so "
                    f'expected mesh["{names[-1] if names else "name"}"].'
                )
            ranks = ranks.get_group()
        elif ranks is not None and not isinstance(ranks, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"context_parallel({type(ranks).__name__}): expected a DeviceMesh, a group or None.")
        if isinstance(layout, str) and layout not in (*LAYOUTS, "balanced"):
            raise ProblemError(f"layout={layout!r}: expected one of {', '.join((*LAYOUTS, 'balanced'))}, or a Layout.")
        check_initialized("context_parallel")
        self.group, self._layout, self._mask = ranks, layout, mask
        self.rank, self.ranks = dist.get_rank(ranks), dist.get_world_size(ranks)
        self.shard: Shard | None = None
        self._balanced: dict[tuple[Fingerprint, int], Layout] = {}

    def layout(self, tokens: int, mask: Mask | None = None) -> Layout:
        """The layout of a sequence; a balanced one is that of the mask of the context, else of this one."""
        if isinstance(self._layout, Layout):
            return self._layout
        if self._layout != "balanced":
            make = LAYOUTS[self._layout] if isinstance(self._layout, str) else self._layout
            return make(tokens, self.ranks)
        mask = mask if self._mask is None else self._mask
        key = None if mask is None else (mask.fingerprint(), tokens)
        if key is None or not key[0].is_cacheable:
            return Layout.balanced(tokens, self.ranks, mask)
        if key not in self._balanced:
            self._balanced = {key: Layout.balanced(tokens, self.ranks, mask)}
        return self._balanced[key]

    @contextmanager
    def sequence(self, tokens: int, mask: Mask | None = None) -> Generator[Shard]:
        """Inside, attention is a ring over all ranks: for modules of your own, that get their inputs sharded.

        Every call of `attend` and of torch's `scaled_dot_product_attention` inside, in this thread, must be one of all
        ranks, over the tokens of the sequence.

        Args:
            tokens: of the whole sequence.
            mask: by which a balanced layout is computed.
        """
        shard = Shard(self.layout(tokens, mask), self.rank, self.group)
        if shard.layout.ranks != self.ranks or shard.layout.tokens != tokens:
            raise ProblemError(f"{shard.layout}: expected {tokens} tokens on {self.ranks} ranks, as called.")
        if not all(shard.layout.counts):
            empty = shard.layout.counts.index(0)
            raise ProblemError(
                f"{tokens} tokens on {self.ranks} ranks: rank {empty} would have none, and modules need one or more. "
                "Call ring_attend itself, or take fewer ranks."
            )
        self.shard = shard
        token = _inside.set(True)
        try:
            with ExitStack() as stack:
                stack.enter_context(route_calls(lambda request: _ring(request, shard)))
                stack.enter_context(_TorchAttention())
                stack.enter_context(tokens_at(shard.positions(), tokens))
                yield shard
        finally:
            _inside.reset(token)

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The tensor of the whole sequence, on every rank, from the last call's output; every rank calls it."""
        if self.shard is None:
            raise ProblemError("unshard before a sequence was sharded: call the model first.")
        return self.shard.unshard(tensor, dim)


_current: ContextVar[ContextParallel | None] = ContextVar("context_parallel", default=None)
_inside: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def context_parallel(
    ranks: Ranks = None, *, layout: LayoutName | Layout = "balanced", mask: Mask | None = None
) -> Generator[ContextParallel]:
    """Shard the sequence of each model that is called inside, in this thread, over the ranks.

    ```python
    with context_parallel(mesh["cp"]) as cp:
        out = model(input_ids=ids, labels=ids)     # ids: whole, the same on every rank
        out.loss.backward()                        # the loss of the whole sequence
    logits = cp.unshard(out.logits)                # if they are needed whole; out.logits has the rank's tokens
    ```

    Models of transformers and modules of `regard.nn`: `Decoder`, `Encoder`, `Block`, `MultiHeadAttention`,
    `LatentAttention`. The outermost call is sharded, so a wrapper (DDP, FSDP2, a trainer) may be around it. Positions
    are those of the whole sequence, labels are shifted before they are sharded, and the loss is the mean over all
    tokens, the same on every rank. The gradients of a rank are those of its tokens: their *sum* over the ranks is the
    gradient of one process, so `all_reduce` them, or with DDP or FSDP2, which take the mean, multiply the loss by the
    number of ranks. Outputs have the rank's tokens only: whole logits may not fit into a memory.

    For modules of your own, `with cp.sequence(tokens) as shard:` and `shard.shard(x, dim)`.

    Args:
        ranks: a DeviceMesh of one dimension (`mesh["cp"]`), a process group, or None for all ranks.
        layout: "balanced" (by the mask of the call), "zigzag", "striped", "contiguous", a function of (tokens, ranks),
            or a `Layout`.
        mask: by which a balanced layout is computed, in place of that of the model.

    Raises:
        RefusalError: a model, or an argument of it, that computes something else from a part of a sequence, by name.
        ProblemError: a mesh of several dimensions, another layout, fewer tokens than ranks; no call was sharded.

    What torch.compile has compiled runs uncompiled inside.

    >>> import torch.distributed as dist
    >>> from regard.nn import Decoder
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more ranks
    >>> model, ids = Decoder(19, 32, layers=2, heads=4), torch.randint(19, (1, 12))
    >>> with context_parallel() as cp:
    ...     logits = cp.unshard(model(ids))
    >>> torch.allclose(logits, model(ids), atol=1e-5)
    True
    >>> dist.destroy_process_group()
    """
    made = ContextParallel(ranks, layout, mask)
    token = _current.set(made)
    try:
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # else nothing was compiled; graphs would attend to their own tokens
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_replaced_calls(made))
            yield made
    finally:
        _current.reset(token)
    if made.shard is None:
        raise ProblemError(
            "no model was sharded in context_parallel, so each rank computed the whole: expected a call of a model of "
            "transformers or a module of regard.nn. For modules of your own, with cp.sequence(tokens) as shard."
        )


def _ring(request: Request, shard: Shard) -> State:
    """A call of the rank's queries and keys, over the whole sequence."""
    if not torch.is_grad_enabled() and _is_checkpointed():
        raise RefusalError(
            "torch.utils.checkpoint(use_reentrant=True) in context_parallel: backward would call the function again, "
            "outside of the ring. Expected use_reentrant=False, with backward inside of the context."
        )
    q, k, v = request.q, cast(object, request.k), cast(object, request.v)
    if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise RefusalError(
            "a KV cache in context_parallel: a step of decoding has few tokens. Shard the cache: `ShardedCache`."
        )
    own = shard.layout.counts[shard.rank]
    if (q.shape[2], k.shape[2]) != (own, own):
        raise RefusalError(
            f"attention of {q.shape[2]} queries to {k.shape[2]} keys in context_parallel, where this rank has {own} "
            "tokens of the sequence: attention to another sequence is not sharded. Call ring_attend with key_layout=."
        )
    if isinstance(request.offset, Tensor) or request.offset not in (None, 0):
        raise RefusalError(f"offset={request.offset} in context_parallel: the sequence attends to itself, from 0.")
    options: dict[str, Any] = {
        "mask": request.mask, "bias": request.bias, "score": request.score, "scale": request.scale,
        "softcap": request.softcap, "layout": shard.layout, "group": shard.group, "backend": request.backend,
    }  # fmt: skip
    if request.lse:
        return ring_attend_state(q, k, v, **options)
    out = ring_attend(q, k, v, sink=request.sink, dropout=request.dropout, **options)
    return State(out, out.new_empty(0))


def _is_checkpointed() -> bool:
    """Whether a reentrant checkpoint, which runs its function without gradients, is among the callers."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


_IN_ONE = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
UNROUTED: frozenset[Any] = frozenset({F.multi_head_attention_forward, *(getattr(torch, name) for name in _IN_ONE)})
"""Functions of torch that compute attention themselves: over the rank's tokens alone."""

FLEX = "torch.nn.attention.flex_attention"


def _module_of_caller() -> str | None:
    """The name of the module that called the function of torch that a mode is asked about."""
    frame: Any = inspect.currentframe()
    return frame.f_back.f_back.f_globals.get("__name__")


class _TorchAttention(TorchFunctionMode):
    """torch's attention as regard's, which is routed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # flex_attention is a Python function that a mode does not intercept; the tensor methods that it calls are.
        if func in UNROUTED or _module_of_caller() == FLEX:
            name = getattr(func, "__name__", "attention") if func in UNROUTED else "flex_attention"
            raise RefusalError(
                f"torch's {name} in context_parallel: it would attend to this rank's tokens alone"
                f"{'' if name == 'flex_attention' else ' (nn.MultiheadAttention, nn.TransformerEncoderLayer)'}. "
                "Expected attend, torch's scaled_dot_product_attention, or regard.nn.MultiHeadAttention."
            )
        function = scaled_dot_product_attention if func is F.scaled_dot_product_attention else func
        return function(*args, **(kwargs or {}))


_lock = Lock()
_contexts: list[ContextParallel] = []
"""Those that are open, in all threads: calls are replaced while there is one."""

_replaced: list[type[nn.Module]] = []


def _kinds() -> Iterator[type[nn.Module]]:
    """The classes whose calls are sharded."""
    yield from _MODULES
    if "transformers" in sys.modules:  # else there is no model of it
        yield import_module("regard.integrate.sharded").MODELS


@contextmanager
def _replaced_calls(made: ContextParallel) -> Generator[None]:
    """The classes with a `__call__` that shards; a hook of torch for all modules gets no keywords."""
    with _lock:
        _contexts.append(made)
        for kind in _kinds():
            if kind not in _replaced:
                kind.__call__ = _call
                _replaced.append(kind)
    try:
        yield
    finally:
        with _lock:
            _contexts.remove(made)
            while not _contexts and _replaced:
                del _replaced.pop().__call__


@torch.compiler.disable
def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    current = _current.get()
    if current is None or _inside.get():
        return nn.Module.__call__(module, *args, **kwargs)
    if isinstance(module, _MODULES):
        return _run_module(module, current, args, kwargs)
    return import_module("regard.integrate.sharded").run_sharded(module, current.sequence, args, kwargs)


def _run_module(module: nn.Module, current: ContextParallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module of `regard.nn` over the rank's tokens."""
    names = ("context", "caches", "cache", "positions")
    refused = [name for name in names if kwargs.get(name) is not None]
    if refused or any(each is not None for each in args[1:]):
        raise RefusalError(
            f"{type(module).__name__}(..., {', '.join(refused) or '2 tensors'}) in context_parallel: the tokens of one "
            "sequence are sharded, from position 0. A cache is sharded by `ShardedCache`."
        )
    name = "tokens" if "tokens" in kwargs else "x"
    x = args[0] if args else kwargs.pop(name)
    if x.ndim < 2:
        raise ProblemError(
            f"{type(module).__name__}({list(x.shape)}) in context_parallel: expected [batch, tokens, ...]."
        )
    mask = kwargs.get("mask")
    own = next((each.mask for each in module.modules() if isinstance(each, MultiHeadAttention | LatentAttention)), None)
    if own is not None:
        mask = own.spec if mask is None else own.spec & mask
    with current.sequence(x.shape[1], mask) as shard:
        return nn.Module.__call__(module, shard.shard(x, 1), **kwargs)
