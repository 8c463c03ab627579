"""Imports regard before pytest collects its doctests: pytest would load a file of an editable install a second time."""

import regard  # noqa: F401  # pyright: ignore[reportUnusedImport]
