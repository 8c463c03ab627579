"""Scores: how a query and a key are compared, before scale, softcap, bias and mask."""

from regard.describe.word import Word, word


class Score(Word):
    """How a query and a key are compared; abstract."""


@word
class Dot(Score):
    """The dot product q . k; what `score=None` means. Vaswani et al. 2017, arXiv:1706.03762, §3.2.1.

    >>> Dot()
    Dot()
    """
