"""The errors that regard raises on purpose.

```
RegardError(Exception)
├── ProblemError(RegardError, ValueError)              what was asked makes no sense: sizes, types, values
│   ├── KeywordError(ProblemError, TypeError)          a keyword that the function does not have
│   └── TorchError(ProblemError, RuntimeError)         the same where torch's own function is stood in for
└── RefusalError(RegardError, NotImplementedError)     it makes sense, and no engine (or not the one named) can run it
```

Every message says what came, what was expected, and what to do.

`SlowWarning` (a `UserWarning`) is no error: the result is right, and takes longer than it need.
"""


class RegardError(Exception):
    """The root: `except RegardError` catches whatever regard raises on purpose."""


class ProblemError(RegardError, ValueError):
    """What was asked makes no sense.

    Raised before anything is computed, by the description that finds it or by `regard.plan.problem.pose`.
    """


class KeywordError(ProblemError, TypeError):
    """A keyword that the function does not have: a `TypeError`, as Python makes of it, that says what to write."""


class TorchError(ProblemError, RuntimeError):
    """A `ProblemError` of `regard.scaled_dot_product_attention`: a `RuntimeError`, as those of torch's function are."""


class RefusalError(RegardError, NotImplementedError):
    """It makes sense, and no engine can run it, or the engine asked for by name cannot.

    Nothing falls back silently: an engine asked for by name runs or raises this with its reasons.
    """


class SlowWarning(UserWarning):
    """Attention on the CPU is slower than it could be: the compiled library, or its best kernels, are missing.

    Given once in a process, at the first call of `attend` that they would have computed. To silence it:
    `warnings.filterwarnings("ignore", category=regard.SlowWarning)`, or the environment variable `REGARD_QUIET=1`.
    """
