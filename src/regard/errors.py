"""The errors of regard.

```
RegardError(Exception)
├── ProblemError(RegardError, ValueError)              an argument is wrong: sizes, types, values
│   ├── KeywordError(ProblemError, TypeError)          a keyword that the function does not have
│   └── TorchError(ProblemError, RuntimeError)         the same in the replacement of torch's own function
├── RefusalError(RegardError, NotImplementedError)     a valid call that no backend (or not the named one) can run
└── RankError(RegardError, RuntimeError)               another rank of a distributed call is lost
```

Every message has what was received, what was expected, and what to do.

Two warnings, each a `UserWarning`, are no errors. `SlowWarning`: the result is right, but slower than possible.
`VersionWarning`: regard was not tested with this version of torch.
"""


class RegardError(Exception):
    """The root: `except RegardError` catches all errors of regard."""


class ProblemError(RegardError, ValueError):
    """An argument, or a combination of arguments, is wrong.

    Raised before anything is computed, by a description or by `regard.plan.pose.pose`.
    """


class KeywordError(ProblemError, TypeError):
    """A keyword that the function does not have: a `TypeError`, as in Python, with what to write instead."""


class TorchError(ProblemError, RuntimeError):
    """A `ProblemError` of `regard.scaled_dot_product_attention`: a `RuntimeError`, as in torch's function."""


class RefusalError(RegardError, NotImplementedError):
    """A valid call that no backend can run, or not the named one.

    Nothing falls back silently: a named backend runs, or raises this with its reasons.
    """


class RankError(RegardError, RuntimeError):
    """Another rank of a distributed call (`regard.parallel`) ended, or did not answer within the timeout.

    The process group cannot be used any more: end the process, and start all ranks again.

    Attributes:
        ranks: the ranks that are lost, by their numbers in the whole world; () where none can be named.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class SlowWarning(UserWarning):
    """Attention on the CPU is slower than it could be: the compiled library, or its best kernels, are missing.

    Issued once per process, at the first call of `attend` that they would have computed. To silence it:
    `warnings.filterwarnings("ignore", category=regard.SlowWarning)`, or the environment variable `REGARD_QUIET=1`.
    """


class VersionWarning(UserWarning):
    """The installed torch is newer than the versions that regard was tested with, so calls may fail.

    Issued once per process, at the first call of `attend`; silenced like `SlowWarning`.
    """
