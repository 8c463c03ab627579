"""The picture of the README: read from the page that `./bench` writes, drawn case by case."""

from pathlib import Path

from benchmarks.peers import BEST
from benchmarks.performance_pages import CASES
from benchmarks.speed_picture import DRAWN, speed_picture

PAGE = Path(__file__).parents[2] / "docs" / "performance" / "zen5.md"
ROWS = "\n".join(
    f"| {case} | {kind} | 2.00 ms | 9 GFLOP/s | 81.3 % | 1,000 us | 0.5x | |\n| {case} | {kind} | 9 ms | 9 ms |"
    for case in CASES
    for kind in ("fp32", "bf16")
)


def test_ratios_are_those_of_the_first_table_that_has_the_case():
    picture = speed_picture(ROWS)
    assert picture.count("torch 0.5x ·") == 2 * len(DRAWN)
    other, whose = BEST[CASES[0], "float32"]
    assert f"torch 0.5x · {whose} {other / 2:.2g}x" in picture


def test_the_picture_is_that_of_the_page():
    assert (PAGE.parents[1] / "speed.svg").read_text() == speed_picture(PAGE.read_text())
