"""Train a two-layer attention-only transformer to learn in context, and measure the circuit that forms.

    python examples/induction.py                       # two minutes of one core
    python examples/induction.py --layers 1            # the control: one layer cannot
    python examples/induction.py --steps 200 --json    # shorter, as JSON

**The text** is a walk. Each sequence has 16 of the 64 tokens in its own cycle; a step follows the cycle, or, one time
in eight, jumps to any of the 16. Nothing can be memorised, since every sequence has another cycle. The next token can
only be read from the sequence: find the current token earlier, and predict the token that followed it there. The jumps
make distances random, so a head that looks a fixed number of tokens back cannot do it, as it could on text that
repeats with a fixed period.

**The circuit** (Olsson et al. 2022, *In-context learning and induction heads*): in layer 0 a head attends to the
previous token and copies it, so that each position has its predecessor; in layer 1 heads attend to tokens that followed
the current one. It takes two layers, and appears suddenly.

**The output**: the share of predictable tokens that the model predicts; the attention of each head to the previous
token and to tokens after an earlier occurrence of its own (with chance), over a scan of offsets, since circuits may be
shifted; and the change of the loss when heads are ablated, one by one and together. A single induction head hardly
matters if others do the same.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.describe.position import Rope
from regard.inspect.intervene.ablate import ablated, ablation_effects
from regard.inspect.measures import induction, offset_score
from regard.inspect.names import HeadName, group_text, head_text
from regard.inspect.observing.observe import Look, observe
from regard.nn import Decoder

VOCABULARY, CYCLE, JUMP, TOKENS = 64, 16, 0.125, 129
WIDTH, HEADS = 128, 8
START = VOCABULARY  # the token that every sequence begins with
OFFSETS = range(4)
INDUCTION = 0.2
"""The least score of an induction head in the last layer; chance is 0.06."""


class Walks(NamedTuple):
    """Sequences [batch, TOKENS], and for each but the first token whether the tokens before it determine it."""

    ids: Tensor
    knowable: Tensor  # bool [batch, TOKENS - 1]


@dataclass(frozen=True)
class HeadFound:
    """A head: its attention `offset` tokens back, and `shift` tokens after an earlier occurrence of its token."""

    layer: int
    head: int
    offset: list[float]  # for each of OFFSETS; 1 is the previous token
    shift: list[float]  # for each of OFFSETS; 1 is induction, 0 the same token
    shift_chance: float  # of shift 1


@dataclass(frozen=True)
class Removed:
    """The effect of ablating heads: the share guessed, and the change of the loss, nats, with a 95 % interval."""

    heads: list[HeadName]
    guessed: float
    change: float
    low: float
    high: float


def walks(sequences: int, random: torch.Generator) -> Walks:
    """Walks, each along its own cycle."""
    cycle = torch.rand(sequences, VOCABULARY, generator=random).argsort(1)[:, :CYCLE]
    jumps = torch.rand(sequences, TOKENS - 1, generator=random) < JUMP
    jumps[:, 0] = True
    to = torch.randint(CYCLE, jumps.shape, generator=random)
    place, places = to[:, 0], []
    left = torch.zeros(sequences, CYCLE, dtype=torch.bool)  # places whose successor has occurred
    knowable = torch.zeros_like(jumps)
    for step in range(TOKENS - 1):
        before, place = place, torch.where(jumps[:, step], to[:, step], (place + 1) % CYCLE)
        knowable[:, step] = ~jumps[:, step] & left.gather(1, before[:, None])[:, 0]
        if step:
            followed = place == (before + 1) % CYCLE
            left.scatter_(1, before[:, None], followed[:, None] | left.gather(1, before[:, None]))
        places.append(place)
    ids = cycle.gather(1, torch.stack(places, 1))
    return Walks(torch.cat([torch.full((sequences, 1), START), ids], 1), knowable)


def make_model(layers: int, seed: int) -> Decoder:
    """Attention only, without MLPs, with rotary embeddings."""
    torch.manual_seed(seed)
    return Decoder(VOCABULARY + 1, WIDTH, layers=layers, heads=HEADS, mlp=False, position=Rope(WIDTH // HEADS))


def train(model: Decoder, steps: int, seed: int, report: Callable[[int, float], None]) -> Decoder:
    """The model after `steps` of AdamW on fresh walks, 64 at a time."""
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 100)
        ids, _ = walks(64, random)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            report(step + 1, loss.item())
    return model.eval()


@torch.no_grad()
def guessed(model: Decoder, text: Walks) -> float:
    """The share of the predictable tokens that are the model's most likely ones."""
    right = model(text.ids[:, :-1]).argmax(-1) == text.ids[:, 1:]
    return right[text.knowable].float().mean().item()


def loss_of(model: Decoder) -> Callable[[Walks], Tensor]:
    """The mean loss of each sequence on predictable tokens, nats: [batch]."""

    def mean_loss(text: Walks) -> Tensor:
        losses = F.cross_entropy(model(text.ids[:, :-1]).mT, text.ids[:, 1:], reduction="none")
        return (losses * text.knowable).sum(1) / text.knowable.sum(1)

    return mean_loss


@torch.no_grad()
def score_heads(model: Decoder, ids: Tensor) -> list[HeadFound]:
    """The attention scores of every head."""

    def scores(look: Look) -> tuple[Tensor, Tensor, Tensor]:
        offsets = torch.stack([offset_score(look.weights, o).value.mean(0) for o in OFFSETS], 1)
        shifts = [induction(look.weights, ids, shift) for shift in OFFSETS]
        return offsets, torch.stack([s.value.mean(0) for s in shifts], 1), shifts[1].chance.mean(0)

    with observe(model, scores) as seen:
        model(ids)
    return [
        HeadFound(one.layer, head, offset.tolist(), shift.tolist(), chance.item())
        for one in seen
        for head, (offset, shift, chance) in enumerate(zip(*one.value, strict=True))
    ]


def removals(model: Decoder, found: list[HeadFound], text: Walks) -> Iterator[Removed]:
    """Each head alone, then half of the induction heads, all of them, and the rest of the last layer."""
    last = max(head.layer for head in found)
    names: list[HeadName] = [(head.layer, head.head) for head in found]
    own = [(head.layer, head.head) for head in found if head.layer == last and max(head.shift[1:]) >= INDUCTION]
    rest = [name for name in names if name[0] == last and name not in own]
    groups = [group for group in (own[: len(own) // 2], own, rest) if len(group) > 1]
    for effect in ablation_effects(model, [text], loss_of(model), [*([name] for name in names), *groups]):
        with ablated(model, effect.heads):
            yield Removed(list(effect.heads), guessed(model, text), effect.change, *effect.interval())


def print_table(found: list[HeadFound], removed: list[Removed]) -> None:
    """Heads with their scores and the effects of ablation, then the groups."""
    print(f"\n{'':6}{'looks back by':^24}  {'behind a token like its own':^33}without it: loss          guessed")
    print(f"{'head':6}" + "".join(f"{o:6}" for o in OFFSETS) + "  " + "".join(f"{o:6}" for o in OFFSETS) + "  chance")
    alone = {tuple(one.heads): one for one in removed}
    for head in found:
        name = (head.layer, head.head)
        columns = "".join(f"{s:6.2f}" for s in head.offset) + "  " + "".join(f"{s:6.2f}" for s in head.shift)
        print(f"{head_text(name):6}{columns}{head.shift_chance:8.2f} {effect_text(alone[name,])}")
    for one in removed[len(found) :]:
        print(f"{group_text(one.heads):64} {effect_text(one)}")


def effect_text(one: Removed) -> str:
    """+0.12 [+0.10, +0.14]   0.95."""
    return f"{one.change:+7.2f} [{one.low:+.2f}, {one.high:+.2f}]{one.guessed:7.2f}"


def main() -> None:
    """Train, measure, ablate, and print the results."""
    parser = argparse.ArgumentParser(description="the induction circuit of a two-layer attention-only transformer")
    parser.add_argument("--steps", type=int, default=600, help="training steps, of 64 sequences each (600)")
    parser.add_argument("--layers", type=int, default=2, help="layers; 1 is the control, which cannot learn it (2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and text (0)")
    parser.add_argument("--sequences", type=int, default=128, help="sequences to measure on, after training (128)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    args = parser.parse_args()
    start, text = time.perf_counter(), walks(args.sequences, torch.Generator().manual_seed(10_000 + args.seed))
    model = make_model(args.layers, args.seed)

    def report(step: int, loss: float) -> None:
        if not args.json:
            seconds = time.perf_counter() - start
            print(f"step {step:5}  {seconds:5.0f} s  loss {loss:.3f}  guessed {guessed(model, text):.2f}", flush=True)

    train(model, args.steps, args.seed, report)
    seconds = time.perf_counter() - start
    found = score_heads(model, text.ids)
    removed = list(removals(model, found, text))
    loss = loss_of(model)(text).mean().item()
    if args.json:
        summary = {"guessed": guessed(model, text), "loss": loss, "seconds": seconds}
        print(json.dumps(summary | {"heads": [*map(asdict, found)], "removed": [*map(asdict, removed)]}))
        return
    print_table(found, removed)


if __name__ == "__main__":
    main()
