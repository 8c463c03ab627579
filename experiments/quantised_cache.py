"""What a quantised KV cache changes in the predictions of SmolLM2-135M on a novel.

The text is fed in pieces of 32 tokens, so that queries see codes: in each cache all tokens are quantised except the
first 32 and the last 32 to 63. Every prediction is compared with the one of a float32 cache: KL divergence of the two
distributions, whether their most probable token is the same, and how often that token is the next one of the text.
"""

from typing import Any

import torch
from record import DOCS, Check, Experiment, Result
from torch import Tensor

from regard.cache import Fp8, Int4, Int8
from regard.evaluate.corpus import samples, text_of
from regard.evaluate.intervals import Interval, drawn
from regard.evaluate.predictions import Feed, Predicted, predicted
from regard.integrate import load, regard_cache, use_regard

CODECS = {
    "bfloat16": torch.bfloat16,
    "Int8": Int8(),
    "Fp8": Fp8(),
    "Int4": Int4(),
    "Int4, keys by token": Int4(keys="token"),
}
UNSCORED = 128
"""First predictions of a passage, which see few codes."""


def passages(tokenizer: Any, quick: bool) -> Tensor:
    """Token ids [samples, tokens + 1] of Moby-Dick; the quick version reads the licence of this repository."""
    if quick:
        return samples((DOCS.parent / "LICENSE").read_text(), tokenizer, 2, 257)
    return samples(text_of(None), tokenizer, 4, 513)


@torch.no_grad()
def hits(model: Any, states: Tensor, targets: Tensor) -> Tensor:
    """Whether the most probable token is the next one of the text, 0 or 1: float64 [predictions]."""
    return (model.lm_head(states).argmax(-1) == targets).double().flatten()


def measure(seed: int, quick: bool) -> Result:
    """Nothing is random but the resamples of the intervals, which have a seed of their own."""
    model, tokenizer, _ = load()
    use_regard(model)
    ids = passages(tokenizer, quick)
    scored, feed = ids.shape[1] - 1 - UNSCORED, Feed(32, 32)
    targets = ids[:, -scored:]
    plain, states = predicted(model, ids, scored, lambda: regard_cache(model), feed, None)
    right = hits(model, states, targets)
    found, lost = dict[str, Predicted](), dict[str, Interval]()
    for name, codec in CODECS.items():
        found[name], changed = predicted(model, ids, scored, lambda c=codec: regard_cache(model, codec=c), feed, states)
        pair = right.numpy(), hits(model, changed, targets).numpy()
        lost[name] = drawn(*pair, of=lambda before, after: 100 * (before - after))
    kl = {name: float(each.kl.mean()) for name, each in found.items()}
    agree = {name: float(each.agree.mean()) for name, each in found.items()}
    size = {name: each.nbytes / plain.nbytes for name, each in found.items()}
    points = "accuracy of the next token lost, percentage points"
    checks = [
        Check("Int8: KL divergence, nats", kl["Int8"], high=0.01),
        Check("Fp8: KL divergence, nats", kl["Fp8"], high=0.01),
        Check(f"Int8: {points}, upper end of the 95 % interval", lost["Int8"].high, high=1.0),
        Check(f"Fp8: {points}, upper end of the 95 % interval", lost["Fp8"].high, high=1.0),
        Check("4 bits cost more: KL divergence of Int4 by that of Int8", kl["Int4"] / kl["Int8"], low=2),
        Check("4 bits cost more: KL divergence of Int4 by that of Fp8", kl["Int4"] / kl["Fp8"], low=2),
        Check(
            "Int4: KL divergence with a scale of the keys for each token, by that with one for each channel",
            kl["Int4, keys by token"] / kl["Int4"],
            low=2,
        ),
    ]
    shown = "; ".join(
        f"{name} {kl[name]:.2g} nats, {100 * agree[name]:.1f} %, {low:+.1f} to {high:+.1f} points"
        for name, (_, low, high) in lost.items()
    )
    return Result(
        "KL divergence, same most probable token, accuracy lost (95 % interval; with float32 "
        f"{100 * right.mean().item():.1f} % are right): {shown}.",
        checks,
        {"kl": kl, "agree": agree, "lost": lost, "size": size, "scored": targets.numel(), "of": len(ids)},
        f"{targets.numel():,} predictions in {len(ids)} passages of {ids.shape[1] - 1} tokens; the intervals resample "
        "predictions, paired. The accuracy is that of the next token of a novel, no benchmark of tasks. Int8 here has "
        "a scale for each channel of 32 keys and for each value, and rounds about as finely as bfloat16. FP8 (e4m3) "
        "has 3 bits of fraction whatever its scale, so its errors are nearer to those of the 4-bit integers with "
        "scales for groups of 32 than to those of Int8. What 4 bits lose is in the divergence; in accuracy it is below "
        f"what {targets.numel():,} predictions can show. A model of 135M parameters with heads of 64; larger ones were "
        "not tried. Longer passages: docs/caches.md.",
    )  # fmt: skip


def draw(figure: Any, data: dict[str, Any]) -> None:
    """KL divergence, disagreement and lost accuracy by codec."""
    first, second, third = figure.subplots(1, 3, sharey=True)
    names = [f"{name}\n{100 * data['size'][name]:.0f} % of the bytes" for name in data["kl"]]
    first.barh(names, data["kl"].values(), color="C0")
    first.set(title="KL divergence from float32, nats", xscale="log")
    second.barh(names, [100 * (1 - share) for share in data["agree"].values()], color="C1")
    second.set(title="another most probable token, %")
    middle, low, high = zip(*data["lost"].values(), strict=True)
    errors = [[m - a for m, a in zip(middle, low, strict=True)], [b - m for m, b in zip(middle, high, strict=True)]]
    third.errorbar(middle, names, xerr=errors, fmt="o", color="C2")
    third.axvline(1, color="gray", linewidth=0.8, linestyle=":")
    third.set(title="accuracy lost, points (95 %)")
    first.invert_yaxis()


EXPERIMENT = Experiment(
    "quantised_cache",
    "Quantised KV caches",
    "Keys and values in 8 bits, INT8 or FP8, cost less than a percentage point of accuracy; 4 bits cost more, and "
    "less where keys are scaled by channel.",
    "Introductions to attention (8 bits); Liu et al. 2024, arXiv:2402.02750 (KIVI), §3 (keys by channel); Hooper et "
    "al. 2024, arXiv:2401.18079 (KVQuant), §3.1",
    "With 8 bits at most 0.01 nats and less than a point of accuracy; with 4 bits at least twice the divergence of "
    "both 8-bit codes, and twice that again with keys scaled by token.",
    measure,
    draw,
    size=(11.0, 3.0),
    quick_decides=False,
)

if __name__ == "__main__":
    EXPERIMENT.main()
