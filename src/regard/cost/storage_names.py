"""Names of how a cache stores keys and values: of `storage` in `regard.cost`, and of `--cache` in the commands."""

DENSE = "dense"
"""The type of the model."""

FLOATS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
}
"""Float types of torch, by the names that they have here."""

CODECS = ("int8", "int4", "fp8")

NAMES = (DENSE, *FLOATS, *CODECS)
"""All of them."""
