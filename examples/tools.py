"""Tools around models of transformers, with attention by regard: PEFT, Trainer, accelerate, lm-evaluation-harness.

    python examples/tools.py peft | trainer | accelerate | lm_eval

Each tool gets a model that `use_regard` was called on, and needs no more. The model is small and has random weights, so
all of them run offline in seconds: the point is what to write, and that it computes what it did before.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

import argparse
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import Module
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from regard.integrate import use_regard

TEXT = b"the cat sat on the mat; "


def small_model(regard: bool = True) -> Any:
    """A Llama of two layers, whose tokens are bytes; with attention by regard, or by torch."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes, pad_token_id=0))
    return use_regard(model) if regard else model


def batches(steps: int, rows: int = 8, tokens: int = 64) -> list[dict[str, torch.Tensor]]:
    """Pieces of a text that repeats, `rows` at a time."""
    data = torch.tensor(list(TEXT * 20))
    torch.manual_seed(1)
    starts = torch.randint(len(data) - tokens, (steps, rows)).tolist()
    made = [torch.stack([data[start : start + tokens] for start in row]) for row in starts]
    return [{"input_ids": batch, "labels": batch.clone()} for batch in made]


def with_peft(steps: int = 30, regard: bool = True) -> list[float]:
    """Train the adapters of LoRA alone; the loss of every step."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        small_model(regard), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return [_step(model, batch, optimizer) for batch in batches(steps)]


def with_trainer(steps: int = 30, regard: bool = True) -> list[float]:
    """Train by transformers' `Trainer`; the loss of every step."""
    from transformers import Trainer, TrainingArguments

    rows = [{name: t[i] for name, t in batch.items()} for batch in batches(steps) for i in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=1,
            report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model=small_model(regard), args=arguments, train_dataset=cast(Any, rows))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_accelerate(steps: int = 30, regard: bool = True) -> list[float]:
    """Train in bfloat16 by accelerate; the loss of every step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = small_model(regard)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    return [_step(model, batch, optimizer, accelerator.backward) for batch in batches(steps)]


def with_lm_eval(regard: bool = True) -> dict[str, float]:
    """Evaluate by the lm-evaluation-harness on a task of its own; its measures."""
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "animals.jsonl"
        path.write_text('{"start": "the cat sat on", "ends": [" the mat", " a mat", " the roof"], "best": 0}\n' * 4)
        task = ConfigurableTask(
            config={
                "task": "animals", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
                "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": folder},
                "doc_to_text": "start", "doc_to_choice": "ends", "doc_to_target": "best",
                "metric_list": [{"metric": "acc"}],
            }
        )  # fmt: skip
        lm = HFLM(pretrained=small_model(regard).eval(), tokenizer=bytes_as_tokens(), backend="causal", max_length=128)
        found = simple_evaluate(model=lm, tasks=[cast(Any, task)], bootstrap_iters=0, log_samples=True)
    assert found is not None
    chances = {f"{i}": sample["filtered_resps"][i][0] for sample in found["samples"]["animals"][:1] for i in range(3)}
    return {"accuracy": found["results"]["animals"]["acc,none"], **chances}


def bytes_as_tokens() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the first 256 characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(256)}, unk_token="?"))  # noqa: S106  # no password
    tokenizer.pre_tokenizer = cast(Any, pre_tokenizers).Split(Regex("[^\\n]|\\n"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="\0", eos_token="\n")  # noqa: S106


def _step(
    model: Module, batch: dict[str, torch.Tensor], optimizer: Any, backward: Any = torch.Tensor.backward
) -> float:
    loss = model(**batch).loss
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def main() -> None:
    """Run one of the tools with regard and with torch, and print what both give."""
    tools = {"peft": with_peft, "trainer": with_trainer, "accelerate": with_accelerate, "lm_eval": with_lm_eval}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tool", choices=tools)
    tool: Any = tools[parser.parse_args().tool]
    for name, regard in (("regard", True), ("torch", False)):
        found = tool(regard=regard)
        shown = found if isinstance(found, dict) else f"loss {found[0]:.4f} -> {found[-1]:.4f}"
        print(f"{name:8}{shown}")


if __name__ == "__main__":
    main()
