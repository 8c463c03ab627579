"""Attention is kernel regression, and with a Gaussian kernel only where the keys have one norm.

Nadaraya and Watson's estimate is `sum_j K(q, k_j) v_j / sum_j K(q, k_j)`. With K = exp(q.k / sqrt(d)) it is attention.
As q.k = (|q|^2 + |k|^2 - |q - k|^2) / 2, that kernel is the product of

    exp(-|q - k|^2 / 2 sqrt(d))    a Gaussian kernel of bandwidth d^(1/4)
    exp(|q|^2 / 2 sqrt(d))         which cancels between numerator and denominator
    exp(|k|^2 / 2 sqrt(d))         which does not

So equal norms of the keys are enough, and a bias of -|k|^2 / 2 sqrt(d) makes attention a Gaussian smoother for any
norms. How nearly equal are the norms in a trained model?
"""

from typing import Any

import torch
from record import DOCS, Check, Experiment, Result
from torch import Tensor

from regard import Call, TensorBias, attend, observe_calls
from regard.integrate import load, use_regard
from regard.scores import Gaussian, SoftDict, nadaraya_watson

N, DIM, V_DIM = 512, 64, 16
SPREADS = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Standard deviations of log |k|."""


def smoother(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula of Nadaraya and Watson with the exponential of the scaled dot product."""
    kernel = torch.exp(q @ k.T / q.shape[1] ** 0.5)
    return (kernel @ v) / kernel.sum(1, keepdim=True)


def with_norms(k: Tensor, spread: float) -> Tensor:
    """Keys of the same directions with log-normal norms around sqrt(d)."""
    norms = DIM**0.5 * torch.exp(spread * torch.randn(len(k), 1, dtype=k.dtype))
    return norms * torch.nn.functional.normalize(k, dim=1)


def apart(a: Tensor, b: Tensor) -> float:
    """The mean over queries of half the sum of |differences|: the share of the weight that is elsewhere."""
    return (a - b).abs().sum(-1).mean().item() / 2


def of_model(tokens: int) -> dict[str, list[float]]:
    """For each head of SmolLM2 on a text: the spread of log |k|, and the share of weight apart from a Gaussian's.

    `first` is the norm of the first key by the median of the others.
    """
    model, tokenizer, _ = load()
    ids = tokenizer((DOCS.parent / "LICENSE").read_text(), return_tensors="pt").input_ids[:, :tokens]
    found = dict[str, list[float]](spread=[], apart=[], first=[])

    def look(call: Call) -> None:
        k = call.k.double().repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)[0]
        scores, norms = call.scale * call.q[0].double() @ k.mT, k.norm(dim=-1)
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        gaussian = scores - call.scale / 2 * norms.square()[:, None]
        exact, other = (torch.softmax(s.masked_fill(hidden, -torch.inf), -1) for s in (scores, gaussian))
        found["apart"] += [apart(*pair) for pair in zip(exact, other, strict=True)]
        found["spread"] += norms[:, 1:].log().std(1).tolist()
        found["first"] += (norms[:, 0] / norms[:, 1:].median(1).values).tolist()

    with torch.no_grad(), observe_calls(look):
        use_regard(model)(input_ids=ids)
    return found


def measure(seed: int, quick: bool) -> Result:
    """Random points in float64; then the heads of SmolLM2."""
    q, k = (torch.randn(N, DIM, dtype=torch.float64) for _ in range(2))
    v, scale = torch.randn(N, V_DIM, dtype=torch.float64), DIM**-0.5
    formula, attention = smoother(q, k, v), attend(q[None, None], k[None, None], v[None, None])[0, 0]
    same = (nadaraya_watson(q, k, v) - formula).abs().max().item()
    gaussian = nadaraya_watson(q, k, v, kernel=Gaussian(DIM**0.25))
    bias = TensorBias((-k.square().sum(1) * scale / 2).expand(1, 1, N, N))
    repaired = attend(q[None, None], k[None, None], v[None, None], bias=bias)[0, 0]

    shares = list[float]()
    for spread in SPREADS:
        keys = with_norms(k, spread)
        dot, rbf = SoftDict(keys, v), SoftDict(keys, v, temperature=1.0, score=Gaussian(DIM**0.25))
        shares.append(apart(dot.weights(q), rbf.weights(q)))
    heads = of_model(64 if quick else 512)
    spread, far, first = (torch.tensor(heads[name]).median().item() for name in ("spread", "apart", "first"))
    near = sum(share <= 0.05 for share in heads["apart"]) / len(heads["apart"])
    error = (attention - formula).abs().max().item()
    checks = [
        Check("attention less the formula of Nadaraya and Watson: greatest difference, float64", error, high=1e-12),
        Check("nadaraya_watson less the formula", same, high=1e-12),
        Check("keys of one norm, queries of any: share of weight apart from a Gaussian's", shares[0], high=1e-12),
        Check(f"key norms that spread by {100 * SPREADS[-1]:.0f} %: the same share", shares[-1], low=0.05),
        Check("attention with the bias -|k|^2 / 2 sqrt(d), less a Gaussian smoother, random norms",
              (repaired - gaussian).abs().max().item(), high=1e-12),
        Check("SmolLM2: share of heads whose weights are within 5 % of a Gaussian's", near, low=0.5),
    ]  # fmt: skip
    return Result(
        f"Attention equals the formula to {error:.0e}, and a Gaussian smoother for keys of one norm to "
        f"{shares[0]:.0e}, whatever the norms of the queries. In SmolLM2 the key norms of the median head spread by "
        f"{100 * spread:.0f} % (the first token apart), and {100 * far:.0f} % of the weight is elsewhere than a "
        f"Gaussian's; {100 * near:.0f} % of {len(heads['apart'])} heads are within 5 %.",
        checks,
        {"spreads": SPREADS, "shares": shares, "heads": heads},
        "Introductions ask for constant norms of queries and keys; those of the queries cancel. A spread of a few "
        "percent is enough for another result, since the exponent is |k|^2 / 2 sqrt(d). The first token, on which "
        f"many heads rest their attention, has {first:.2f} times the norm of the others (median of the heads): a "
        "Gaussian kernel weighs it quite differently. One model, one text: the licence of this repository.",
    )  # fmt: skip


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Weight elsewhere, by the spread of the key norms: random keys, and the heads of the model."""
    axes = figure.subplots()
    heads = data["heads"]
    axes.plot(heads["spread"], heads["apart"], ".", color="C1", markersize=4, label="heads of SmolLM2-135M")
    axes.plot(data["spreads"], data["shares"], marker="o", label="random keys")
    axes.set(
        title="attention and a Gaussian smoother",
        xlabel="spread of the key norms: std of log |k|",
        ylabel="weight elsewhere",
    )
    axes.legend()


EXPERIMENT = Experiment(
    "kernel_smoother",
    "Attention as a kernel smoother",
    "Attention is Nadaraya-Watson regression with the kernel exp(q.k / sqrt(d)); for constant norms, and so "
    "approximately in trained models, that is a Gaussian (RBF) kernel.",
    "Tsai et al. 2019, arXiv:1908.11775, §3; Nadaraya 1964; Watson 1964",
    "Equality to rounding; a Gaussian for keys of one norm; a difference that grows with the spread of the norms.",
    measure,
    draw,
    size=(5.5, 3.6),
)

if __name__ == "__main__":
    EXPERIMENT.main()
