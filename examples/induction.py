"""Train a two-layer attention-only transformer to learn in context, and look at the circuit that it grew.

    python examples/induction.py                       # two minutes of one core
    python examples/induction.py --layers 1            # the control: one layer cannot
    python examples/induction.py --steps 200 --json    # less of it, for programs

**The text** is a walk. Each sequence has 16 of the 64 tokens in a cycle of its own; a step goes on along the cycle, or,
one time in eight, jumps to any of the 16. Nothing can be learned by heart, since every sequence has another cycle. What
comes next can only be read off the sequence: find the current token earlier, and say what followed it there. The jumps
make distances random, so no head can do it by looking a fixed number of tokens back, as it could on text that repeats
with a fixed period.

**The circuit** (Olsson et al. 2022, *In-context learning and induction heads*): in layer 0 a head looks at the token
before and copies it along, so that each token knows what it followed; in layer 1 heads look for tokens that followed
the current one. It takes two layers, and appears suddenly.

**What is shown**: the share of tokens guessed of those that can be; how much each head looks one token back and at
tokens that followed its own (with chance), over a scan of offsets, since circuits may be shifted; and what the loss
does when heads are taken out, one by one and together. One induction head hardly matters where others do the same.
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
from regard.inspect.names import HeadName
from regard.inspect.observing.observe import Look, observe
from regard.nn import Decoder

VOCABULARY, CYCLE, JUMP, TOKENS = 64, 16, 0.125, 129
WIDTH, HEADS = 128, 8
START = VOCABULARY  # the token that every sequence begins with
OFFSETS = range(4)
INDUCTION = 0.2
"""From here on a head of the last layer is called an induction head; chance is 0.06."""


class Walks(NamedTuple):
    """Sequences [batch, TOKENS], and for each but the first token whether it can be known from those before it."""

    ids: Tensor
    knowable: Tensor  # bool [batch, TOKENS - 1]


@dataclass(frozen=True)
class HeadFound:
    """A head: how much it looks `offset` tokens back, and at tokens `shift` behind an earlier one like the current."""

    layer: int
    head: int
    offset: list[float]  # for each of OFFSETS; 1 is the previous token
    shift: list[float]  # for each of OFFSETS; 1 is induction, 0 the same token
    shift_chance: float  # of shift 1


@dataclass(frozen=True)
class Removed:
    """What taking heads out does: the share guessed, and the change of the loss, nats, with a 95 % interval."""

    heads: list[HeadName]
    guessed: float
    change: float
    low: float
    high: float


def walks(sequences: int, random: torch.Generator) -> Walks:
    """Walks, each along a cycle of its own."""
    cycle = torch.rand(sequences, VOCABULARY, generator=random).argsort(1)[:, :CYCLE]
    jumps = torch.rand(sequences, TOKENS - 1, generator=random) < JUMP
    jumps[:, 0] = True
    to = torch.randint(CYCLE, jumps.shape, generator=random)
    place, places = to[:, 0], []
    left = torch.zeros(sequences, CYCLE, dtype=torch.bool)  # places whose successor was seen
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


def made(layers: int, seed: int) -> Decoder:
    """Attention and nothing else: no MLPs; positions are rotations."""
    torch.manual_seed(seed)
    return Decoder(VOCABULARY + 1, WIDTH, layers=layers, heads=HEADS, mlp=False, position=Rope(WIDTH // HEADS))


def trained(model: Decoder, steps: int, seed: int, say: Callable[[int, float], None]) -> Decoder:
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
            say(step + 1, loss.item())
    return model.eval()


@torch.no_grad()
def guessed(model: Decoder, text: Walks) -> float:
    """The share of the tokens that can be known that the model thinks likeliest."""
    right = model(text.ids[:, :-1]).argmax(-1) == text.ids[:, 1:]
    return right[text.knowable].float().mean().item()


def loss_of(model: Decoder) -> Callable[[Walks], Tensor]:
    """The mean loss of each sequence on tokens that can be known, nats: [batch]."""

    def mean_loss(text: Walks) -> Tensor:
        losses = F.cross_entropy(model(text.ids[:, :-1]).mT, text.ids[:, 1:], reduction="none")
        return (losses * text.knowable).sum(1) / text.knowable.sum(1)

    return mean_loss


@torch.no_grad()
def looked_at(model: Decoder, ids: Tensor) -> list[HeadFound]:
    """Every head, by what it looks at."""

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


def said(name: HeadName) -> str:
    """L0H2."""
    return f"L{name[0]}H{name[1]}"


def print_table(found: list[HeadFound], removed: list[Removed]) -> None:
    """Heads with what they look at and what they are worth, then the groups."""
    print(f"\n{'':6}{'looks back by':^24}  {'behind a token like its own':^33}without it: loss          guessed")
    print(f"{'head':6}" + "".join(f"{o:6}" for o in OFFSETS) + "  " + "".join(f"{o:6}" for o in OFFSETS) + "  chance")
    alone = {tuple(one.heads): one for one in removed}
    for head in found:
        name = (head.layer, head.head)
        columns = "".join(f"{s:6.2f}" for s in head.offset) + "  " + "".join(f"{s:6.2f}" for s in head.shift)
        print(f"{said(name):6}{columns}{head.shift_chance:8.2f} {worth(alone[name,])}")
    for one in removed[len(found) :]:
        print(f"{'+'.join(map(said, one.heads)):64} {worth(one)}")


def worth(one: Removed) -> str:
    """+0.12 [+0.10, +0.14]   0.95."""
    return f"{one.change:+7.2f} [{one.low:+.2f}, {one.high:+.2f}]{one.guessed:7.2f}"


def main() -> None:
    """Train, look, take out, and say what was found."""
    parser = argparse.ArgumentParser(description="the induction circuit of a two-layer attention-only transformer")
    parser.add_argument("--steps", type=int, default=600, help="of training, 64 sequences each (600)")
    parser.add_argument("--layers", type=int, default=2, help="1 is the control, which cannot learn it (2)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and text (0)")
    parser.add_argument("--sequences", type=int, default=128, help="to look at, after training (128)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    given = parser.parse_args()
    start, text = time.perf_counter(), walks(given.sequences, torch.Generator().manual_seed(10_000 + given.seed))
    model = made(given.layers, given.seed)

    def say(step: int, loss: float) -> None:
        if not given.json:
            seconds = time.perf_counter() - start
            print(f"step {step:5}  {seconds:5.0f} s  loss {loss:.3f}  guessed {guessed(model, text):.2f}", flush=True)

    trained(model, given.steps, given.seed, say)
    seconds = time.perf_counter() - start
    found = looked_at(model, text.ids)
    removed = list(removals(model, found, text))
    loss = loss_of(model)(text).mean().item()
    if given.json:
        said_of = {"guessed": guessed(model, text), "loss": loss, "seconds": seconds}
        print(json.dumps(said_of | {"heads": [*map(asdict, found)], "removed": [*map(asdict, removed)]}))
        return
    print_table(found, removed)


if __name__ == "__main__":
    main()
