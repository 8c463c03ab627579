"""Scores: how a query is compared with a key. Kernel regression is attention with the score of a distance."""

from regard.describe.score import Additive, Bilinear, Cosine, Dot, Epanechnikov, Gaussian, Laplacian, Score
from regard.nadaraya_watson import nadaraya_watson
from regard.soft_dict import SoftDict

__all__ = [
    "Additive",
    "Bilinear",
    "Cosine",
    "Dot",
    "Epanechnikov",
    "Gaussian",
    "Laplacian",
    "Score",
    "SoftDict",
    "nadaraya_watson",
]
