"""A survey in a terminal: the run, the generated text, and the table of heads. Printed with rich.

In a terminal the scores have bars; a pipe or a file gets plain columns with the same values.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from unicodedata import category

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.cli import heads_table
from regard.cli.generation_report import rate
from regard.cli.heads_table import head_detail
from regard.cli.model_comparison import comparison
from regard.cli.token_count import tokens_of
from regard.inspect.surveying.report import Ablations, Report, RunInfo

SHOWN = 240
"""Characters of the prompt's end that are shown before the continuation."""

WORD = 40
"""Characters of the longest word that is left out where its beginning is missing."""

CONTROLS = ("Cc", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode's categories of control characters, surrogates, characters without a sign, and line separators."""

DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that reverse the order of the text after them."""

UNLIMITED = 1_000_000
"""Characters of a line in a pipe or a file: tables are as wide as their columns, and nothing is cut."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error, which `run_command` handles; rich's own method ends the process with exit code 1."""
        raise BrokenPipeError


def show(
    report: Report,
    *,
    top: int,
    measures: Sequence[str] | None = None,
    heads: Sequence[tuple[int, int]] = (),
    console: Console | None = None,
) -> None:
    """Print a report: the `top` most remarkable heads by these measures, and some heads in detail."""
    console = console or _Console(highlight=False)
    plain = not console.is_terminal
    console.width = UNLIMITED if plain else max(heads_table.NARROWEST, console.width)
    parts: list[RenderableType] = [
        _facts(report),
        "",
        _text(report, plain=plain),
        "",
        *_heads(report, min(top, len(report.heads)), measures, console),
        *(part for head in heads for part in head_detail(report, head)),
        *(_comparison(report, report.other, top, measures, heads, plain=plain) if report.other is not None else ()),
        "",
    ]
    for part in parts:
        console.print(part, soft_wrap=plain and not isinstance(part, Table))


def _comparison(
    report: Report,
    other: Report,
    top: int,
    measures: Sequence[str] | None,
    heads: Sequence[tuple[int, int]],
    *,
    plain: bool,
) -> Iterator[RenderableType]:
    yield Text("\ncompared with ").append(_facts(other))
    yield ""
    if other.continuation:
        yield _text(other, plain=plain)
        yield ""
    yield from comparison(report, other, top, measures)
    for head in heads:
        yield from head_detail(other, head, visible(other.run.model))


# ---- the run and the generated text ---------------------------------------------------------------------------------


def _facts(report: Report) -> Text:
    run, generated = report.run, len(report.tokens) - report.prompt_tokens
    sharing = f"{run.heads} heads on {run.kv_heads} key heads" if run.kv_heads < run.heads else f"{run.heads} heads"
    rows = [
        ("model", f"{_layers(run.layers)} of {sharing}, {run.head_dim} wide; {_parameters(run.parameters)} parameters"),
        ("attention", f"{_backends(run)}; {run.attention_gflop:,.2f} GFLOP for {run.pairs:,} query-key pairs"),
        ("prompt", f"{tokens_of(report.prompt_tokens)}{rate(run.tokens_per_second)}"),
        ("generated", f"{tokens_of(generated)}{rate(run.decode_tokens_per_second)}"),
        ("eager", _difference(run)),
        ("machine", run.machine),
    ]
    text = Text.assemble((visible(run.model), "bold"))
    rows += [("ablation", _ablation(report.ablations))] if report.ablations is not None else []
    rows += [("sinks", heads_table.sinks(report.sink_shares))] if report.sink_shares else []
    rows += [("note", visible(note)) for note in run.notes]
    for name, value in rows:
        text.append(f"\n  {name:<10}", "dim").append(value.replace("\n", "\n" + 12 * " "))
    return text


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def _ablation(result: Ablations) -> str:
    instead = {"zero": "nothing", "mean": "its mean"}.get(result.how, result.how)
    layer, head = max(result.deltas, key=result.deltas.__getitem__)
    return (
        f"loss {result.loss:.3f} nats per token; with {instead} in place of one head, at most "
        f"{result.deltas[layer, head]:+.3f} ({layer}.{head}). {result.caveat}"
    )


def _backends(run: RunInfo) -> str:
    return ", ".join(f"{name} x{count}" for name, count in Counter(run.backends).items())


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _difference(run: RunInfo) -> str:
    if run.eager_difference is None:
        return "not compared"
    return f"{run.eager_output} at most {run.eager_difference:.1e} from transformers' eager attention"


def _text(report: Report, *, plain: bool) -> RenderableType:
    """The end of the prompt, and the generated text."""
    shown = report.text if len(report.text) <= SHOWN else "… " + _from_a_word(report.text[-SHOWN:])
    text = Text.assemble((visible(shown), "dim"), (visible(report.continuation), "bold"))
    return text if plain else Padding(text, (0, 2))


def _from_a_word(text: str) -> str:
    """The text from its second word on, and all of it where the first word is long, as in texts without spaces.

    >>> _from_a_word("y one two"), _from_a_word("二" * 99) == "二" * 99
    ('one two', True)
    """
    return text[text.find(" ", 0, WORD) + 1 :]


def visible(text: str) -> str:
    r"""The text with control characters made visible, except line breaks.

    Spaces of other widths, joiners and soft hyphens are text.

    >>> visible("a\x1b[31mb\n"), visible("100\u202fm\u202e")
    ('a␛[31mb\n', '100\u202fm\ufffd')
    """
    return "".join(_picture(character) if _is_control(character) else character for character in text)


def _is_control(character: str) -> bool:
    """Whether a terminal may obey the character, or have no sign for it; not a line break."""
    return character != "\n" and (category(character) in CONTROLS or character in DIRECTIONS)


def _picture(control: str) -> str:
    return chr(0x2400 + ord(control)) if ord(control) < 32 else "\ufffd"


# ---- the heads ------------------------------------------------------------------------------------------------------


def _heads(report: Report, top: int, measures: Sequence[str] | None, console: Console) -> Iterator[RenderableType]:
    """The heads by kind, then the most remarkable heads with these measures."""
    yield heads_table.kinds(report)
    if not top:
        return
    shown = tuple(dict.fromkeys(measures or heads_table.USUAL))
    shown += ("delta_loss",) if report.ablations is not None and "delta_loss" not in shown else ()
    yield ""
    yield Text(f"The {top} most remarkable:" if top < len(report.heads) else "Most remarkable first:")
    fits = heads_table.fitting(report.heads[:top], shown, console.width) if console.is_terminal else shown
    yield heads_table.table(report.heads[:top], fits, console)
    yield ""
    yield heads_table.legend(fits, sure=any(head.sure is not None for head in report.heads))
    if left := shown[len(fits) :]:
        yield Text(f"No room for {', '.join(left)}: see the page, --heads, --json or --csv.", "dim")
