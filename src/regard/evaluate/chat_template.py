"""Chat templates: the form in which one takes a question, and the texts that it puts around the question.

```
{"role": "user", "content": "Who?"}                              most templates
{"role": "user", "content": [{"type": "text", "text": "Who?"}]}  templates for texts and images, which drop a text
```
"""

from collections.abc import Callable
from datetime import date
from typing import Any, NamedTuple

from regard.errors import ProblemError

MARK = "\N{SYMBOL FOR SUBSTITUTE}"
"""A question that no template contains by itself."""

CONTENTS: tuple[Callable[[str], Any], ...] = (lambda text: text, lambda text: [{"type": "text", "text": text}])
"""What makes the content of a message from a text, in the order in which they are tried."""

NO_CHAT = "the model has no chat template that contains the question exactly once: leave --chat out."


class MarkedPrompt(NamedTuple):
    """The prompt of a chat template for the question `MARK`.

    Attributes:
        content: makes the content of a message from a text, as the template takes it.
        text: the prompt; it has no `MARK` where the template drops the question.
    """

    content: Callable[[str], Any]
    text: str


def marked_prompt(tokenizer: Any, advice: str) -> MarkedPrompt:
    """The prompt for `MARK`, in the first form of a message with which it contains `MARK`.

    Args:
        advice: a sentence for the error: what to do without the template.

    Raises:
        ProblemError: the template fails for a form, and the prompt of the other one does not contain `MARK`.
    """
    found, errors = list[MarkedPrompt](), list[Exception]()
    for content in CONTENTS:
        try:
            found.append(MarkedPrompt(content, _in_template(tokenizer, content(MARK))))
        except Exception as error:  # noqa: BLE001  a template is a program, which raises anything
            errors.append(error)
        else:
            if MARK in found[-1].text:
                return found[-1]
    if errors:
        raise template_fails(errors[0], advice)
    return found[-1]


def template_fails(error: Exception, advice: str) -> ProblemError:
    """The error for a chat template that raises this one."""
    reason = " ".join(str(error).split())
    return ProblemError(
        f"the model's chat template fails: {reason if len(reason) <= 160 else reason[:159] + '…'}. {advice}"
    )


def texts_around(tokenizer: Any) -> tuple[str, str]:
    """The texts of the chat template before and after a question: the same on every day, as examples and digests are.

    Raises:
        ProblemError: there is no template, it fails, it does not contain the question exactly once, or it asks for the
            day in a format that has parts beyond `_PARTS`.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ProblemError(NO_CHAT)
    text = marked_prompt(tokenizer, "Leave --chat out.").text
    if UNKNOWN in text:
        part = text.partition(UNKNOWN)[2][:1]
        raise ProblemError(
            f"the chat template asks for the day by %{part}: expected parts such as %d, %B or %Y. Change the template, "
            "or leave --chat out."
        )
    if text.count(MARK) != 1:
        raise ProblemError(NO_CHAT)
    before, _, after = text.partition(MARK)
    return before, after


def _in_template(tokenizer: Any, content: Any) -> str:
    """The text of the chat template for a message of the user."""
    messages, options = [{"role": "user", "content": content}], {"add_generation_prompt": True, "tokenize": False}
    if "strftime_now" in str(tokenizer.chat_template):
        options["chat_template"] = CLOCK + tokenizer.get_chat_template()
    return tokenizer.apply_chat_template(messages, **options)


# ---- the day --------------------------------------------------------------------------------------------------------

TODAY = date(2024, 7, 26)
"""The day of every prompt: the one of Llama 3.1's chat template where it cannot know the day."""

_WHOLE = {
    "c": "%a %b %e %T %Y", "x": "%D", "X": "%T", "D": "%m/%d/%y", "e": f"{TODAY.day:2}", "F": "%Y-%m-%d", "h": "%b",
    "R": "%H:%M", "T": "%H:%M:%S",
}  # fmt: skip
"""Format codes that abbreviate other format codes; each comes before the codes that it contains."""

_PARTS = (
    _WHOLE
    | {part: TODAY.strftime(f"%{part}") for part in "aAbBdfGHIjmMpSuUVwWyYzZ"}
    | {f"-{part}": TODAY.strftime(f"%{part}").lstrip("0") or "0" for part in "dHIjmMSy"}
)
"""What each format code becomes on that day, at midnight."""

UNKNOWN = "\N{SYMBOL FOR NEGATIVE ACKNOWLEDGE}"
CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace('%{part}', '{text}')" for part, text in _PARTS.items())
    + f"|replace('%', '{UNKNOWN}') }}}}{{% endmacro %}}\n"
)
"""What is put before a chat template that asks for the day, so that it gets `TODAY`; `UNKNOWN` for other parts."""
