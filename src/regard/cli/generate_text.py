"""`regard generate` after its options: load the model, generate with the cache, report.

`regard.cli.generate` has the options and imports this file once they are checked.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.bench.rounds import on_threads
from regard.cli.generate_options import NEW_TOKENS, SINKS, CacheSpec, cache_spec, check_seed, sampling_settings
from regard.cli.generation import CHUNK, INTERRUPTED, Generation, Listener, generate, step_plans
from regard.cli.generation_report import CacheMemory, as_dict, cache_memory, report
from regard.cli.outputs import STDOUT, write_json
from regard.cli.progress import progress_bars
from regard.cli.text_stream import TextStream
from regard.errors import ProblemError
from regard.evaluate.chat_template import CONTENTS, MARK, MarkedPrompt, marked_prompt, template_fails
from regard.storage.stored import Rolling

CONTROLS = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"} | dict.fromkeys(range(127, 160), "�")
"""Control characters, and what a terminal is shown instead."""


def generate_text(args: argparse.Namespace, prompt: str) -> int:
    """Generate as the options say, and return the exit code."""
    spec = cache_spec(args)
    with on_threads(args.threads or torch.get_num_threads()), _without_warnings(), ExitStack() as bars:
        progress = bars.enter_context(progress_bars())
        progress("model", 0, 1)
        model, tokenizer, facts = _load(args)
        progress("model", 1, 1)
        ids = prompt_ids(tokenizer, prompt, chat=facts["chat"]).to(model.device)
        cache, settings = _prepare(args, model, spec, ids.shape[1])
        if args.explain:
            text = _explain(cache, step_plans(model, ids, cache, settings))
            bars.close()
            print(text)
            return 0
        listener = Listener(_stream(tokenizer, ids, args), _printer(quiet=args.json == STDOUT), bars.close)
        made = generate(model, ids, cache, listener, settings, progress)
        compare = args.compare_cache and made.ended != INTERRUPTED
        plain = _generate_plain(args, model, tokenizer, ids, settings) if compare else None
    return _show(args, made, plain, cache_memory(cache), facts)


def _load(args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """(model with regard's attention, tokenizer, facts for the report)."""
    from regard.integrate.checkpoint import load

    model, tokenizer, label = load(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    from regard.integrate.transformers import use_regard

    if not model.can_generate():
        raise ProblemError(f"{label} is a {type(model).__name__}, which generates no text: name a language model.")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if args.chat and not has_template:
        raise ProblemError(f"{label} has no chat template: pass a text to continue, with --raw.")
    use_regard(model)
    facts: dict[str, Any] = {"model": label, "dtype": args.dtype, "device": str(model.device)}
    facts["threads"] = torch.get_num_threads()
    return model, tokenizer, facts | {"chat": has_template and not args.raw, "positions": context_length(model)}


def _prepare(args: argparse.Namespace, model: Any, spec: CacheSpec, prompt: int) -> tuple[Any, dict[str, Any]]:
    """(the cache, keyword arguments of transformers' `generate`)."""
    from regard.integrate.cache import regard_cache

    check_seed(args, model.generation_config)
    window = spec.layout.window if isinstance(spec.layout, Rolling) else None
    tokens = new_tokens(model, prompt, args.max_new_tokens, window)
    context, is_decoder = context_length(model), not model.config.is_encoder_decoder
    if args.compare_cache and is_decoder and context is not None and prompt + tokens > context:
        raise ProblemError(
            f"--compare-cache generates {prompt + tokens:,} tokens with a plain cache as well, and the model has "
            f"{context:,} positions: generate fewer (--max-new-tokens), or omit --compare-cache."
        )
    settings = sampling_settings(args) | {"max_new_tokens": tokens, "use_cache": True}
    if args.ignore_eos:
        settings["min_new_tokens"] = tokens
    if spec.evict is None and is_decoder:  # a policy must see the whole prompt before it evicts
        settings["prefill_chunk_size"] = CHUNK if window is None else min(CHUNK, window)
    torch.manual_seed(args.seed or 0)
    return regard_cache(model, **spec._asdict()), settings


def _stream(tokenizer: Any, ids: Tensor, args: argparse.Namespace) -> TextStream:
    return TextStream(tokenizer, ids[0].tolist(), args.stop or ())


def _generate_plain(
    args: argparse.Namespace, model: Any, tokenizer: Any, ids: Tensor, settings: dict[str, Any]
) -> Generation:
    """The same with a cache that keeps every token in the type of the model; its text is not shown."""
    from regard.integrate.cache import regard_cache

    with progress_bars() as progress:
        count, stage = settings["max_new_tokens"], "generating with a plain cache"
        listener = Listener(
            _stream(tokenizer, ids, args), lambda _: progress(stage, len(listener.tokens), count), lambda: None
        )
        torch.manual_seed(args.seed or 0)
        return generate(model, ids, regard_cache(model), listener, settings, progress)


def _explain(cache: Any, step: list[tuple[int, str]]) -> str:
    """What the layers store, and the plan of a step with the number of calls that share it."""
    lines = [cache.explain(), "", "a step after the prompt:"]
    for calls, plan in step:
        lines += [f"  {calls} call{'s' * (calls > 1)} of attention", *(f"    {line}" for line in plan.splitlines())]
    return "\n".join(lines)


def _printer(*, quiet: bool) -> Callable[[str], None]:
    """A function that prints pieces of text immediately. On a terminal control characters are made visible."""
    is_terminal = sys.stdout.isatty()

    def show(piece: str) -> None:
        if piece and not quiet:
            print(piece.translate(CONTROLS) if is_terminal else piece, end="", flush=True)

    return show


def _show(
    args: argparse.Namespace, made: Generation, plain: Generation | None, memory: CacheMemory, facts: dict[str, Any]
) -> int:
    """Write the report, and return the exit code."""
    write_json(args.json, as_dict(made, plain, memory, facts))
    if args.json != STDOUT:
        if made.text and not made.text.endswith("\n"):
            print(flush=True)
        print(f"\n{report(made, plain, memory, facts)}", file=sys.stderr)
    return 130 if INTERRUPTED in (made.ended, plain and plain.ended) else 0


@contextmanager
def _without_warnings() -> Generator[None]:
    """Inside, transformers logs nothing: it would warn of settings that the model itself came with."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


# ---- the prompt as tokens -------------------------------------------------------------------------------------------


def prompt_ids(tokenizer: Any, text: str, *, chat: bool) -> Tensor:
    """The tokens of a prompt, int64 [1, tokens]: as a question in the model's chat template, or as it is.

    Raises:
        ProblemError: the template fails or drops the text, or there are no tokens.
    """
    ids = _chat_ids(tokenizer, text.strip()) if chat else tokenizer(text)["input_ids"]
    if not ids:
        raise ProblemError(f"the prompt {text[:40]!r} has no tokens in this model: expected a word or more.")
    return torch.tensor([ids])


RAW = "Give the prompt as it is, with --raw."


def _chat_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of the chat template for a text of the user."""

    def of(text: str) -> list[int]:
        messages = [{"role": "user", "content": prompt.content(text)}]
        try:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # noqa: BLE001  a template is a program, which raises anything
            raise template_fails(error, RAW) from None

    try:
        prompt = marked_prompt(tokenizer, RAW)
    except ProblemError:  # it may take this text all the same
        prompt = MarkedPrompt(CONTENTS[0], "")
    ids = of(text)
    if MARK not in prompt.text and ids == of(f"{text} {MARK}"):
        raise ProblemError(f"the model's chat template drops the text of the user. {RAW}")
    return ids


def new_tokens(model: Any, prompt: int, limit: int | None, window: int | None) -> int:
    """The tokens to generate at most: `limit`, or the default as far as the model's context has room for it.

    Args:
        prompt: tokens of the prompt.
        window: tokens that a rolling cache keeps; None for all.

    Raises:
        ProblemError: the model has fewer positions.
    """
    context = context_length(model)
    if context is None:
        return NEW_TOKENS if limit is None else limit
    if window is not None:
        if window > context:
            raise ProblemError(f"--window {window:,} is more than the {context:,} positions of the model.")
        return NEW_TOKENS if limit is None else limit
    left = context if model.config.is_encoder_decoder else context - prompt
    if prompt > context or left < (1 if limit is None else limit):
        wanted = NEW_TOKENS if limit is None else limit
        more = ["use --window"] if _rolls(model) else []
        *advice, last = ["shorten the prompt", "generate fewer (--max-new-tokens)", *more]
        raise ProblemError(
            f"the prompt is {prompt:,} tokens and {wanted:,} are to be generated, and the model has {context:,} "
            f"positions: {', '.join(advice)}{',' * (len(advice) > 1)} or {last}."
        )
    return min(NEW_TOKENS, left) if limit is None else limit


def _rolls(model: Any) -> bool:
    """Whether a rolling cache goes with the model."""
    from regard.integrate.cache import regard_cache

    try:
        regard_cache(model, layout=Rolling(SINKS + 1))
    except ProblemError:
        return False
    return True


def context_length(model: Any) -> int | None:
    """The positions of the model; None if its config gives no limit."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
