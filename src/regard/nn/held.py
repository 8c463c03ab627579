"""`Held`: a word whose tensors belong to a module, so that everything that moves, saves or trains modules sees them.

A word is frozen and holds its tensors by identity; a module's tensors change identity with `.to()`, deepcopy and
`torch.func.functional_call`. So what is held is the word's plan with a name in place of each tensor, and `.word` is
made of the tensors that bear these names now.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from regard.describe.word import Word
from regard.errors import ProblemError

W = TypeVar("W", bound=Word)

_parameters: Any = WeakIdKeyDictionary()
"""The Parameter made of a tensor, so that a word given to several layers is trained once. It shares the memory
of the tensor; gradients are its own."""


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands for a tensor: the name under which the module has it."""

    name: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """A word to be made: its class, and its parts, some of which are named or planned."""

    make: Callable[..., Word]
    parts: tuple[Any, ...]


class Held(nn.Module, Generic[W]):
    """A word as a module: what in it requires gradients is a Parameter, every other tensor a buffer.

    A tensor is named as its field, through words in words with `_` between: `table`, `b_table`. A tensor that stands
    in the word twice is held once. Held modules are themselves taken where modules take words, so that layers can
    share one, as T5's share their table.

    Args:
        word: any word; one without tensors is handed back as it is. Functions (`Where`) are kept as they are: tensors
            inside them are not seen.

    Raises:
        ProblemError: it is no word, or a tensor in it was computed from others, so it can be no Parameter.

    >>> import torch
    >>> from regard import Alibi, T5Bias
    >>> bias = Held(T5Bias(torch.zeros(32, 8, requires_grad=True)) + Alibi(8))
    >>> bias
    Held(T5Bias(table=float32[32, 8]) + Alibi(heads=8))
    >>> [name for name, _ in bias.named_parameters()]
    ['a_table']
    >>> bias.to(torch.float64).word
    T5Bias(table=float64[32, 8]) + Alibi(heads=8)
    """

    def __init__(self, word: W) -> None:
        super().__init__()
        if not isinstance(word, Word):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"Held takes a word, such as a mask or a bias, and got {type(word).__name__}.")
        self._names: dict[int, str] = {}
        self._plan = self._planned(word, "") if word.tensors() else word
        del self._names  # identities of tensors, of no meaning later

    @property
    def word(self) -> W:
        """The word of now."""
        return cast(W, self._made(self._plan) if isinstance(self._plan, _Plan) else self._plan)

    def extra_repr(self) -> str:
        return repr(self.word)

    def _planned(self, part: Any, name: str) -> Any:
        prefix = f"{name}_" if name else ""
        if isinstance(part, Tensor):
            return self._registered(part, name)
        if isinstance(part, tuple):
            return tuple(self._planned(p, f"{prefix}{i}") for i, p in enumerate(cast("tuple[Any, ...]", part)))
        if not isinstance(part, Word):
            return part
        fields = zip(part._fields, part.parts(), strict=True)  # pyright: ignore[reportPrivateUsage]
        return _Plan(type(part), tuple(self._planned(p, prefix + field) for field, p in fields))

    def _registered(self, tensor: Tensor, name: str) -> _Named:
        known = self._names.setdefault(id(tensor), name)
        if known != name:
            return _Named(known)
        if not tensor.requires_grad:
            self.register_buffer(name, tensor)
        elif isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        elif tensor.is_leaf:
            self.register_parameter(name, _parameters.setdefault(tensor, nn.Parameter(tensor)))
        else:
            raise ProblemError(
                f"{name} was computed from other tensors, and a module can hold only what it may train itself: pass "
                "tensor.detach() to keep its numbers, or hold what it was computed from."
            )
        return _Named(name)

    def _made(self, plan: Any) -> Any:
        if isinstance(plan, _Named):
            return getattr(self, plan.name)
        if isinstance(plan, tuple):
            return tuple(self._made(part) for part in cast("tuple[Any, ...]", plan))
        return plan.make(*[self._made(part) for part in plan.parts]) if isinstance(plan, _Plan) else plan


def held(word: "W | Held[W] | None") -> "Held[W] | None":
    """The word held; what is held already, or None, as it is.

    >>> held(None) is None
    True
    """
    return word if word is None or isinstance(word, Held) else Held(word)
