"""Copying: whether what a head writes, when it looks at a token, makes the model expect that token.

This is a property of weights, of the circuit from values to outputs (OV), and takes no text:

    token x -> embedding E[x] -> norm -> W_V -> W_O -> norm -> unembedding U -> how much each token y is raised

The norms' weights are folded into W_V and W_O, and each embedding is divided by its root mean square (after its mean is
taken off, where the norm does so), as the norm before the first layer does. Left out are the biases of norms and
projections, and two divisions by a root mean square: that of the last norm, and in latent attention that of the
latent's norm (`kv_a_layernorm` of DeepSeek). Each is one positive number for all y of a token x, so `copying`, which
compares the y of one x, is the same with them; `copying_eigenvalues` is not. In layers after the first a token's
residual stream is no longer its embedding: the circuit is then that of the token's direct path.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.measures.means import Tokens, token_ids
from regard.inspect.measures.score import HeadScores

TOKENS = 25
"""Random tokens of a sequence; Olsson et al. 2022."""


@brief
@dataclass(frozen=True, eq=False)
class Circuit:
    """The OV circuit of a layer, with the weights of the norms in it.

    Args:
        w_v: [kv_heads, v_dim, d_model].
        w_o: [heads, v_dim, d_model].
    """

    w_v: Tensor
    w_o: Tensor


@brief
@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens to copy.

    Args:
        embedding, unembedding: the embeddings, normalised, and the unembeddings, [vocabulary, d_model] each.
        drawn_from: int64 ids that `copying` draws from, such as `plain_tokens`; None for the whole vocabulary.

    >>> e = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> Vocabulary(e, e).product
    tensor([[1., 0.],
            [0., 4.]], dtype=torch.float64)
    """

    embedding: Tensor
    unembedding: Tensor
    drawn_from: Tokens | None = None

    @cached_property
    def product(self) -> Tensor:
        """sum over tokens of E[x] U[x]^T, [d_model, d_model], in float64: all that the eigenvalues need of them."""
        width, parts = (
            self.embedding.shape[1],
            zip(self.embedding.split(4096), self.unembedding.split(4096), strict=True),
        )
        found = torch.zeros(width, width, dtype=torch.float64, device=self.embedding.device)
        for e, u in parts:
            found += (e.mT.float() @ u.float()).double()
        return found


def copying(circuit: Circuit, vocabulary: Vocabulary, *, sequences: int = 8, seed: int = 0) -> HeadScores:
    """The share of the attended token in the logits that a head raises among 25 random tokens.

        l[x, y] = U[y] . W_O W_V E[x]        r[x, y] = ReLU(l[x, y] - mean_y l[x, y])
        score = mean over x of  r[x, x] / sum_y r[x, y]

    Olsson et al. 2022, *In-context learning and induction heads*, appendix (head activation evaluators), who take the
    head's output on the sequence, by its attention there, and rescale so that [0, 1/2] becomes [-1, 1]: 4 score - 1.
    Here the head looks at one token at a time, so that its attention has no part in it. A row in which nothing is
    raised counts as 0. Chance: 1/25, what a head gives that raises tokens regardless of x.

    Returns:
        [sequences, heads].

    Raises:
        ProblemError: fewer than 2 tokens to draw from, ids out of range, or a circuit of another width.

    >>> eye = torch.eye(7)  # tokens that have nothing in common; one head copies, one raises the others
    >>> circuit, vocabulary = Circuit(eye[None], torch.stack([eye, -eye])), Vocabulary(eye, eye)
    >>> copying(circuit, vocabulary, sequences=1)
    HeadScores(value=tensor([[1., 0.]]), chance=tensor([[0.1429, 0.1429]]))
    """
    among = vocabulary.drawn_from
    ids = torch.arange(len(vocabulary.embedding)) if among is None else token_ids(among).cpu()
    count = min(TOKENS, len(ids))
    if count < 2 or sequences < 1:
        raise ProblemError(f"{sequences} sequences, {len(ids)} tokens to draw from: expected 1 and 2 at least.")
    if not 0 <= int(ids.min()) <= int(ids.max()) < len(vocabulary.embedding):
        raise ProblemError(f"drawn_from has ids up to {int(ids.max())}: expected 0 to {len(vocabulary.embedding) - 1}.")
    _check_fit(circuit, vocabulary)
    random = torch.Generator().manual_seed(seed)
    drawn = [ids[torch.randperm(len(ids), generator=random)[:count]] for _ in range(sequences)]
    picked = torch.stack(drawn).to(vocabulary.embedding.device)  # [sequences, tokens]
    e, u = (table[picked].float() for table in (vocabulary.embedding, vocabulary.unembedding))
    group = circuit.w_o.shape[0] // circuit.w_v.shape[0]
    values = torch.einsum("stm,hvm->shtv", e, circuit.w_v.float()).repeat_interleave(group, dim=1)
    logits = torch.einsum("shtv,hvm,sym->shty", values, circuit.w_o.float(), u)
    raised = (logits - logits.mean(-1, keepdim=True)).relu()
    total = raised.sum(-1)
    share = raised.diagonal(dim1=2, dim2=3) / total.clamp(min=torch.finfo(total.dtype).tiny)
    return HeadScores.of_rows(share, torch.full_like(share, 1 / count), torch.ones_like(share, dtype=torch.bool))


def copying_eigenvalues(circuit: Circuit, vocabulary: Vocabulary) -> HeadScores:
    """How positive the eigenvalues of U W_O W_V E are: sum of lambda / sum of |lambda|, from -1 to 1.

    1: every eigenvector, a mixture of tokens, raises itself. Elhage et al. 2021, *A mathematical framework for
    transformer circuits*, on detecting copying behaviour. Of the [vocabulary, vocabulary] matrix only v_dim eigenvalues
    differ from 0, which are those of W_V E U W_O. The norms' divisions that the circuit leaves out would weight the
    tokens x. Chance: 0, the mean of random weights.

    Returns:
        [1, heads], without an interval: nothing was drawn.

    >>> eye = torch.eye(7)
    >>> circuit, vocabulary = Circuit(eye[None], torch.stack([eye, -eye])), Vocabulary(eye, eye)
    >>> copying_eigenvalues(circuit, vocabulary).value
    tensor([[ 1., -1.]])
    """
    _check_fit(circuit, vocabulary)
    group = circuit.w_o.shape[0] // circuit.w_v.shape[0]
    w_v = circuit.w_v.double().repeat_interleave(group, dim=0)
    matrix = w_v @ vocabulary.product @ circuit.w_o.double().mT  # [heads, v_dim, v_dim]
    eigenvalues = torch.linalg.eigvals(matrix)
    value = (eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1).clamp(min=1e-300))[None].float()
    return HeadScores(value, torch.zeros_like(value))


def _check_fit(circuit: Circuit, vocabulary: Vocabulary) -> None:
    v, o, e, u = (tuple(t.shape) for t in (circuit.w_v, circuit.w_o, vocabulary.embedding, vocabulary.unembedding))
    if len(v) != 3 or len(o) != 3 or v[1:] != o[1:] or o[0] % v[0] or e != u or e[1:] != v[2:]:
        raise ProblemError(
            f"w_v is {list(v)}, w_o {list(o)}, embeddings are {list(e)} and unembeddings {list(u)}: expected "
            "[kv_heads, v_dim, d_model], [heads, v_dim, d_model] and twice [vocabulary, d_model]."
        )
