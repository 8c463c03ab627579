"""A cache that can forget its last tokens, and notices where a call of the model that failed left its layers apart.

Some layers of attention then have the tokens of the call, and the others do not. A state, as of linear attention, does
not tell how many tokens it contains, so such layers know whether the current pass has reached them (`is_reached`).
"""

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, StaticLayer

from regard.errors import ProblemError, RefusalError
from regard.integrate.cache_fixed import FixedLayer
from regard.integrate.cache_layers import CrossLayer, StoredLayer
from regard.integrate.cache_options import ranges
from regard.integrate.decoder import Decoder, classes_of, write_states


class CroppableCache(DynamicCache):
    """A transformers cache with layers of regard's and of transformers, each with `is_reached`; abstract.

    Attributes:
        decoder: of the model that it is for.
    """

    decoder: Decoder

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens in all layers; their count is a negative number.

        Layers that a failed call did not reach have none of its tokens; only the other layers are cropped.

        Raises:
            ProblemError: a layer no longer keeps the tokens that the next one would look back on, or its state, as of
                linear attention, does not go back; no layer is changed.
        """
        for i, removed in self._check_crop(tokens_to_remove).items():
            layer = cast(Any, self.layers[i])
            layer.crop(removed)
            layer.is_reached = False

    def activate_past_recording(self) -> None:
        """Prepare for drafts that may be rejected, as assisted decoding does.

        Raises:
            RefusalError: layers that evict, or windows of a fixed size, which drafts overwrite.
        """
        fixed = [i for i, layer in enumerate(self.layers) if isinstance(layer, StaticLayer) and not layer.is_croppable]
        if fixed:
            raise RefusalError(
                f"{self!r} cannot serve assisted or prompt-lookup decoding: its layers {ranges(fixed)} keep a window "
                "in memory of a fixed size, where drafts overwrite tokens that are still needed. Use Contiguous()."
            )
        super().activate_past_recording()

    def _attending(self) -> dict[int, Any]:
        """The layers of regard's that count their tokens."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, StoredLayer | FixedLayer)}

    def _lengths(self) -> dict[int, int]:
        """The tokens of each of these layers; the host waits for a GPU once, not for each layer."""
        lengths = {i: layer.get_seq_length() for i, layer in self._attending().items()}
        waiting = [i for i, n in lengths.items() if isinstance(n, Tensor)]
        if waiting:
            device = lengths[waiting[0]].device
            read = torch.stack([lengths[i].to(device) for i in waiting]).flatten().tolist()
            lengths |= dict(zip(waiting, read, strict=True))
        return lengths

    def _stateful_layers(self) -> dict[int, Any]:
        """The layers that keep a state of all tokens, as of linear attention."""
        return {i: layer for i, layer in enumerate(self.layers) if hasattr(layer, "update_conv_state")}

    def _hybrid_layers(self) -> dict[int, Any]:
        """The layers with a state and those of attention: a state does not tell how many tokens it contains.

        Each knows whether the current pass has reached it. There are none where the model keeps its states itself.
        """
        stateful = self._stateful_layers()
        if not stateful:
            return {}
        are_here = any(x.is_reached for x in stateful.values()) or write_states(classes_of(self.decoder.config))
        return dict(sorted((stateful | self._attending()).items())) if are_here else {}

    def _check_crop(self, tokens_to_remove: int) -> dict[int, int]:
        """How many tokens `crop` removes of each layer, as negative numbers; empty: it changes nothing.

        Raises:
            ProblemError: see `crop`.
        """
        attending, lengths = self._attending(), self._lengths()
        most, least = max(lengths.values(), default=0), min(lengths.values(), default=0)
        counts = dict.fromkeys(range(len(self.layers)), most) | lengths
        counts |= {i: most if layer.is_reached else least for i, layer in self._stateful_layers().items()}
        left = most + tokens_to_remove
        removed = {i: tokens_to_remove if tokens_to_remove > 0 else min(left - n, 0) for i, n in counts.items()}
        for i, layer in attending.items():
            layer.check_crop(removed[i])
        if not tokens_to_remove or (attending and not most):
            return {}  # there is nothing to remove
        self._check_states(tokens_to_remove)
        if most == least:  # else the lengths say how many tokens the failed call had
            self._check_reached()
        return removed

    def _check_reached(self) -> None:
        """Raise `ProblemError` if a call has reached some layers and not others, as one that failed leaves them.

        All lengths are equal where it failed before the first layer of attention, or after the last.
        """
        layers = self._hybrid_layers()
        reached = [i for i, layer in layers.items() if layer.is_reached]
        if 0 < len(reached) < len(layers):
            raise ProblemError(
                f"a call of the model failed between layers: layers {ranges(reached)} of {self!r} have its tokens, "
                f"in keys or in states, and layers {ranges([i for i in layers if i not in reached])} do not. Start "
                "anew, with reset()."
            )

    def _check_lengths(self) -> None:
        """Raise `ProblemError` if the first layers have tokens of a call that the last lack, as one that failed leaves.

        Lengths that are on a GPU are not read: the host would wait for them.
        """
        layers = list(self._attending().values())
        ends = [layer.get_seq_length() for layer in (layers[0], layers[-1])] if layers else [0]
        if any(isinstance(n, Tensor) and not n.is_cpu for n in ends) or int(ends[0]) == int(ends[-1]):
            return
        lengths = self._lengths()
        most, least = max(lengths.values()), min(lengths.values())
        try:
            self._check_crop(least - most)
            advice = f"Remove its tokens, crop({least - most}), or call reset()"
        except ProblemError:
            advice = "Its tokens cannot be removed: start anew, with reset()"
        raise ProblemError(
            f"layers {ranges([i for i, n in lengths.items() if n == most])} of {self!r} have {most} tokens and "
            f"others {least}: a call of the model failed between them. {advice}."
        )

    def _check_states(self, tokens_to_remove: int) -> None:
        """Raise `ProblemError` if transformers' own layers cannot go back, or do not record what they need for it."""
        numbered = enumerate(cast("list[Any]", self.layers))
        own = {i: layer for i, layer in numbered if not isinstance(layer, StoredLayer | FixedLayer | CrossLayer)}
        without = [i for i, layer in own.items() if not layer.is_croppable]
        unprepared = [i for i, layer in own.items() if not getattr(layer, "record_past", True)]
        if without or unprepared:
            record = "call activate_past_recording() before you append tokens that may be removed again"
            raise ProblemError(
                f"crop({tokens_to_remove}): layers {ranges(without or unprepared)} of {self.decoder.name} keep a state "
                "of all tokens, from which the last ones cannot be removed: "
                f"{'start anew, with reset()' if without else record}."
            )
