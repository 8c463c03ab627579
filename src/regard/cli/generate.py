"""`regard generate`: let a model write, with its keys and values in any of regard's caches.

```
prompt, model, words of a cache -> the text on stdout, as it comes -> how fast it was, what the cache held, on stderr
```
"""

import argparse
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.cli import cache_options, sampling
from regard.cli.bench import count, stages
from regard.cli.cache_options import PLAIN, CacheWords
from regard.cli.given import read
from regard.cli.outputs import STDOUT, add_force, check_outputs, outputs, write_json
from regard.cli.prompt import USUAL, positions, prompt_ids, room
from regard.cli.text_stream import TextStream
from regard.cli.writing import CHUNK, CUT, Listener, Written, plans, write
from regard.cli.written import Held, as_json, held, told_of
from regard.errors import ProblemError
from regard.integrate.checkpoint import device_of
from regard.storage.stored import Rolling

DTYPES = ("float32", "bfloat16", "float16")

CONTROLS = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"} | dict.fromkeys(range(127, 160), "�")
"""What a terminal would obey, and what it is shown instead."""


def add_to(commands: Any) -> None:
    """Add the command and its arguments to the parser of `regard`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="let a model write, with any cache, and tell how fast it was and what the cache held",
        description="Let a model write on, its attention and its cache regard's. The text goes to stdout as it comes, "
        "the numbers to stderr.",
        epilog='Example: regard generate --prompt "Why is the sky blue?" --cache int8 --window 1024 --sinks 4.',
    )
    default = "(default: SmolLM2-135M-Instruct)"
    parser.add_argument("model", nargs="?", help=f"a folder, or a name that transformers knows {default}")
    parser.add_argument("--model", dest="named", metavar="MODEL", help="the same")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text, a file, or - for stdin")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="the prompt is a question, for the model's chat template")
    form.add_argument(
        "--raw", action="store_true", help="the prompt is a text to go on with (default without a template)"
    )
    parser.add_argument("--tokens", type=count(1), metavar="N", help=f"tokens to write at most (default: {USUAL})")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be said again")
    parser.add_argument("--no-end", action="store_true", help="write all --tokens, also where the model would end")
    sampling.add_to(parser)
    cache_options.add_to(parser)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="type of the weights (default: float32)")
    parser.add_argument("--device", default="cpu", help="such as cuda, cuda:1, mps (default: cpu)")
    parser.add_argument("--threads", type=count(1), metavar="N", help="threads (default: as torch has)")
    parser.add_argument(
        "--compare", action="store_true", help="then write with a plain cache, and tell where texts part"
    )
    parser.add_argument(
        "--explain", action="store_true", help="show what layers keep and how a step runs; write nothing"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="text and numbers as JSON; - for stdout, with nothing else there"
    )
    add_force(parser)
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Write what was asked for. What can be wrong with the options is found before the model is loaded."""
    _check(asked)
    words = cache_options.words(asked)
    text = read(asked.prompt).removesuffix("\n")
    with _threads(asked.threads), _without_warnings(), ExitStack() as drawn:
        progress = drawn.enter_context(stages()) or (lambda stage, done, total: None)
        progress("model", 0, 1)
        model, tokenizer, facts = _loaded(asked)
        progress("model", 1, 1)
        ids = prompt_ids(tokenizer, text, chat=facts["chat"]).to(model.device)
        cache, settings = _prepared(asked, model, words, ids.shape[1])
        if asked.explain:
            told = _explained(cache, plans(model, ids, cache, settings))
            drawn.close()
            print(told)
            return 0
        listener = Listener(_stream(tokenizer, ids, asked), _shower(quiet=asked.json == STDOUT), drawn.close)
        written = write(model, ids, cache, listener, settings, progress)
        plain = _plain(asked, model, tokenizer, ids, settings) if asked.compare and written.ended != CUT else None
    return _told(asked, written, plain, held(cache), facts)


def _check(asked: argparse.Namespace) -> None:
    """Raise `ProblemError` for options that do not go together, or a place that cannot be written to."""
    if asked.model is not None and asked.named is not None:
        raise ProblemError(f"two models are named, {asked.model} and --model {asked.named}: leave one of them out.")
    if "" in (asked.stop or ()):
        raise ProblemError("--stop is empty, and every text begins with that: give a character or more.")
    for name in ("json", "compare", "stop", "no_end"):
        if asked.explain and getattr(asked, name):
            option = f"--{name.replace('_', '-')}"
            raise ProblemError(f"--explain writes nothing, so there is nothing for {option}: leave one of them out.")
    if asked.compare and cache_options.words(asked) == PLAIN:
        raise ProblemError(
            "--compare is with a plain cache, and that is what is asked for: add --cache int8, or others."
        )
    model = asked.model or asked.named
    check_outputs(outputs(("--json", asked.json, "JSON")), force=asked.force, texts=[asked.prompt], models=[model])
    sampling.check(asked)
    device_of(asked.device)


def _loaded(asked: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """(model with regard's attention, tokenizer, what is to be told of them)."""
    from regard.integrate.checkpoint import load

    dtype = getattr(torch, asked.dtype)
    model, tokenizer, label = load(asked.model or asked.named, dtype=dtype, device=asked.device)
    from regard.integrate.transformers import use_regard

    if not model.can_generate():
        raise ProblemError(f"{label} is a {type(model).__name__}, which writes no text: name a language model.")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if asked.chat and not has_template:
        raise ProblemError(f"{label} comes without a chat template: give it a text to go on with, --raw.")
    use_regard(model)
    facts: dict[str, Any] = {"model": label, "dtype": asked.dtype, "device": str(model.device)}
    facts["threads"] = torch.get_num_threads()
    return model, tokenizer, facts | {"chat": has_template and not asked.raw, "positions": positions(model)}


def _prepared(asked: argparse.Namespace, model: Any, words: CacheWords, prompt: int) -> tuple[Any, dict[str, Any]]:
    """(the cache, the settings of transformers' `generate`)."""
    from regard.integrate.cache import regard_cache

    sampling.check_drawn(asked, model.generation_config)
    window = words.layout.window if isinstance(words.layout, Rolling) else None
    tokens = room(model, prompt, asked.tokens, window)
    context = positions(model)
    if asked.compare and context is not None and prompt + tokens > context and not model.config.is_encoder_decoder:
        raise ProblemError(
            f"--compare writes {prompt + tokens:,} tokens with a plain cache as well, and the model was made for "
            f"{context:,} positions: write fewer (--tokens), or leave --compare out."
        )
    settings = sampling.settings(asked) | {"max_new_tokens": tokens, "use_cache": True}
    if asked.no_end:
        settings["min_new_tokens"] = tokens
    if words.evict is None and not model.config.is_encoder_decoder:  # a policy looks at the whole prompt before it goes
        settings["prefill_chunk_size"] = CHUNK if window is None else min(CHUNK, window)
    torch.manual_seed(asked.seed or 0)
    return regard_cache(model, **words._asdict()), settings


def _stream(tokenizer: Any, ids: Tensor, asked: argparse.Namespace) -> TextStream:
    return TextStream(tokenizer, ids[0].tolist(), asked.stop or ())


def _plain(asked: argparse.Namespace, model: Any, tokenizer: Any, ids: Tensor, settings: dict[str, Any]) -> Written:
    """The same once more, with a cache that keeps everything as it comes; nothing of it is shown."""
    from regard.integrate.cache import regard_cache

    with ExitStack() as drawn:
        progress = drawn.enter_context(stages()) or (lambda stage, done, total: None)
        count = settings["max_new_tokens"]
        stream, tell = _stream(tokenizer, ids, asked), "writing with a plain cache"
        listener = Listener(stream, lambda _: progress(tell, len(listener.tokens), count), lambda: None)
        torch.manual_seed(asked.seed or 0)
        return write(model, ids, regard_cache(model), listener, settings, progress)


def _explained(cache: Any, step: list[tuple[int, str]]) -> str:
    """What the layers keep, and the plan of a step, each as often as it is run."""
    lines = [cache.explain(), "", "a step after the prompt:"]
    for calls, plan in step:
        lines += [f"  {calls} call{'s' * (calls > 1)} of attention", *(f"    {line}" for line in plan.splitlines())]
    return "\n".join(lines)


def _shower(*, quiet: bool) -> Callable[[str], None]:
    """Prints pieces of text as they come. A terminal is shown control characters, and does not obey them."""
    is_terminal = sys.stdout.isatty()

    def show(piece: str) -> None:
        if piece and not quiet:
            print(piece.translate(CONTROLS) if is_terminal else piece, end="", flush=True)

    return show


def _told(asked: argparse.Namespace, written: Written, plain: Written | None, held: Held, facts: dict[str, Any]) -> int:
    """Tell how it went, and return the exit code."""
    write_json(asked.json, as_json(written, plain, held, facts))
    if asked.json != STDOUT:
        if written.text and not written.text.endswith("\n"):
            print(flush=True)
        print(f"\n{told_of(written, plain, held, facts)}", file=sys.stderr)
    return 130 if CUT in (written.ended, plain and plain.ended) else 0


@contextmanager
def _threads(count: int | None) -> Generator[None]:
    """So many threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_warnings() -> Generator[None]:
    """Without transformers' log, which warns of settings that the model itself came with."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
