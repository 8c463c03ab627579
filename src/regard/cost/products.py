"""FLOPs of attention from its kept pairs: what `explain`, torch's FLOP counter of our operator and `regard cost` count.

A multiply-add is 2. Softmax is not counted, as in Dao et al. 2022, arXiv:2205.14135, §4, and in torch's FLOP counter.
"""


def attention_flops(pairs: int, qk_dim: int, v_dim: int) -> int:
    """The two products of the forward pass, `q . k` and `weights @ v`: 2 (qk_dim + v_dim) for each pair and head.

    >>> attention_flops(8 * 2048**2, 64, 64)
    8589934592
    """
    return 2 * pairs * (qk_dim + v_dim)


def attention_gradient_flops(pairs: int, qk_dim: int, v_dim: int) -> int:
    """The five products of the backward pass: the scores once more, and the gradients of weights, q, k and v.

    Dao et al. 2022, arXiv:2205.14135, §B.4.
    """
    return 2 * pairs * (3 * qk_dim + 2 * v_dim)


def latent_flops(
    *, queries: int, keys: int, pairs: int, heads: int, dims: tuple[int, int, int, int]
) -> tuple[int, int]:
    """FLOPs of multi-head latent attention of one batch row: (expanded, absorbed), as in `regard.nn.LatentAttention`.

    Args:
        pairs: kept pairs of one head.
        dims: kv_rank, nope_dim, rope_dim, v_dim.

    One query of DeepSeek-V3 on 4,096 keys, each form by the context:

    >>> expanded, absorbed = latent_flops(queries=1, keys=4096, pairs=4096, heads=128, dims=(512, 128, 64, 128))
    >>> expanded // 4096, absorbed // 4096, expanded // absorbed
    (33636352, 286720, 117)
    """
    rank, nope, rope, v_dim = dims
    expanded = 2 * keys * rank * heads * (nope + v_dim) + 2 * heads * pairs * (nope + rope + v_dim)
    absorbed = 2 * queries * rank * heads * (nope + v_dim) + 2 * heads * pairs * (2 * rank + rope)
    return expanded, absorbed
