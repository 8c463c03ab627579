"""The published texts of needles and of questions about them, and what is drawn for them.

Needles, questions and the beginnings of answers are those of RULER: Hsieh et al. 2024, arXiv:2404.06654, appendix B.
RULER draws its words from the package wonderwords; here they are 40 adjectives and 40 nouns, and 200 of each where
1,600 pairs are too few.
"""

import random
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from regard.evaluate.tokens import Tokenizer

_ADJECTIVES = """
amber ancient bitter brave bright calm clever cold curious deep eager early faint fierce gentle golden green happy
hollow honest hungry lazy little lonely loud mild modern narrow noble pale proud quiet rapid rough royal silent steep
tender vivid wild"""
_NOUNS = """
anchor apple arrow badger basket beacon bridge button candle canyon carpet castle cellar circus compass copper feather
forest garden glacier hammer harbor island jacket kettle ladder lantern marble meadow mirror orchard pepper pigeon
rocket saddle spider teapot tunnel violin window"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())

_MORE_ADJECTIVES = """
abrupt active agile airy alert aloof ample apt arid austere azure balmy bare beige bland blank bleak blithe blunt bold
bony brisk brittle broad bronze burly busy candid careful casual chilly civic clear clumsy coarse compact cosmic cozy
crimson crisp crooked cryptic cubic damp daring dense devout dim distant docile drowsy dry dull dusty earnest eastern
elastic elder elegant even exact exotic faded famous fancy fearless feral fertile final fine firm fiscal flat fluid
foggy formal fragile frank fresh frosty frugal full fuzzy giant giddy glad glossy grand grave great grim gusty handy
hardy hasty heavy hidden hoarse huge humble humid icy idle immense inner ivory jolly keen kind lavish lean light limber
lively local lofty loyal lucid lunar magic maroon massive mellow merry mighty misty moist muted mystic native neat
nimble noisy northern novel oblong obscure odd opaque ornate outer oval pastel patient peppery placid plain pleasant
plump polite prickly prim prompt rare ripe robust rocky rosy rustic rusty"""
_MORE_NOUNS = """
acorn album almond anvil apron atlas attic badge bamboo banjo banner barley barrel basin bell bench berry bison blanket
blossom bottle boulder bucket buffalo bugle cabin cactus camel canoe canvas cape cargo carrot cavern cedar chalk chapel
cherry chisel cider citadel clover coach cobra coconut coffee comet coral cottage cotton cradle crane crater cricket
crown crystal curtain cushion cymbal dagger daisy desert dolphin domino donkey dragon drum eagle easel elbow ember
engine envelope fabric falcon ferry fiddle flute fossil fountain fox galaxy garlic gazelle ginger giraffe goblet gorilla
granite grape gravel guitar hamlet hatchet hedge helmet heron hickory honey horizon hornet hotel iceberg igloo iris ivy
jaguar jasmine jewel jigsaw kayak kitten koala lagoon lake lemon lentil lily lizard lobster locket locust magnet
magnolia mango manor maple market meteor mill mitten monk monsoon mosaic muffin mustard napkin needle nettle oasis oboe
ocean olive onion opera otter oyster paddle palace panther parrot pebble pelican piano pillow plum pumpkin puzzle quilt
rabbit"""
MANY_ADJECTIVES, MANY_NOUNS = (*ADJECTIVES, *_MORE_ADJECTIVES.split()), (*NOUNS, *_MORE_NOUNS.split())


class Prompt(NamedTuple):
    """The texts around a context: before it, the question, the beginning of the answer, and what is between these."""

    before: str
    question: str
    begun: str
    between: str = " "


def niah(kind: str, keys: Sequence[str], values: int) -> Prompt:
    """The prompt for the values of these keys, `values` each; `kind` is numbers, words or uuids.

    >>> print("...".join(niah("numbers", ["calm-harbor"], 1)[:3]))
    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the
    number afterwards.
    ...
    What is the special magic number for calm-harbor mentioned in the provided text?...The special magic number for
    calm-harbor mentioned in the provided text is
    """
    query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    is_one = len(keys) * values == 1
    some, what, are = ("A", kind[:-1], "is") if is_one else ("Some", kind, "are")
    return Prompt(
        f"{some} special magic {what} {are} hidden within the following text. Make sure to memorize it. I will quiz "
        f"you about the {what} afterwards.\n",
        f"\nWhat {are if is_one else 'are all'} the special magic {what} for {query} mentioned in the provided text?",
        f"The special magic {what} for {query} mentioned in the provided text {are}",
    )


def needle(kind: str, key: str, value: str) -> str:
    """The sentence that is hidden.

    >>> needle("numbers", "calm-harbor", "4812207")
    'One of the special magic numbers for calm-harbor is: 4812207.'
    """
    return f"One of the special magic {kind} for {key} is: {value}."


def draw(kind: str, draw: random.Random) -> str:
    """A value or a key: of seven digits, two words, two of many words, or a UUID.

    >>> draw("words", random.Random(0))
    'loud-lantern'
    """
    if kind == "numbers":
        return str(draw.randint(10**6, 10**7 - 1))
    if kind == "words":
        return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"
    if kind == "many words":
        return f"{draw.choice(MANY_ADJECTIVES)}-{draw.choice(MANY_NOUNS)}"
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def distinct(kind: str, count: int, by: random.Random) -> list[str]:
    """Values of a kind, all different."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(kind, by)] = None
    return list(found)


def question_and_target(
    tokenizer: Tokenizer, prompt: Prompt, answer: str, close: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The tokens of the question with the beginning of the answer, and those of the answer.

    Args:
        close: tokens of the chat template between question and answer; none in a plain text.
    """
    if close:
        asked = [*tokenizer.encode_after(prompt.question), *close, *tokenizer.encode_after(prompt.begun)]
    else:
        begun = prompt.between + prompt.begun if prompt.begun else ""
        asked = tokenizer.encode_after(prompt.question + begun)
    space = " " if prompt.begun or not close else ""
    return asked, tokenizer.encode_after(space + answer) if answer else []
