"""Names of float types, and of how a cache stores keys and values.

Those of `dtype` and `storage` in `regard.cost`, and of `--dtype` and `--cache` in the commands.
"""

DENSE = "dense"
"""The type of the model."""

FLOATS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
}
"""Float types of torch, by the names that they have here."""

CODECS = ("int8", "int4", "fp8")

NAMES = (DENSE, *FLOATS, *CODECS)
"""All names of how a cache stores keys and values."""


def float_name(name: str) -> str:
    """The name of torch for a float type, without "torch."; other names as they are.

    >>> float_name("bf16"), float_name("torch.float32"), float_name("int8")
    ('bfloat16', 'float32', 'int8')
    """
    plain = name.removeprefix("torch.")
    return FLOATS.get(plain, plain)
