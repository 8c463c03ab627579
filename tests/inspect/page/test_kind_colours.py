"""Every kind of heads has a colour of its own, the same on every page, that any reader can tell from the others."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from regard.inspect.surveying.kinds import KINDS as RULES
from regard.inspect.surveying.kinds import MIXED
from tests.inspect.reports import report

KINDS = (*(kind.name for kind in RULES), MIXED)

SIGHT = {  # what is left of linear red, green and blue: Machado et al. 2009, doi:10.1109/TVCG.2009.113, severity 1
    "every colour": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}

TO_LMS = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
TO_LAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]


def of_kinds(kinds):
    """A report with a head of each kind."""
    made = report(heads=len(kinds), layers=1, kv_heads=1)
    return replace(made, heads=tuple(replace(h, kind=kind) for h, kind in zip(made.heads, kinds, strict=True)))


def linear(words):
    """The numbers of rgb(...), in linear light."""
    light = np.array([int(n) for n in re.findall(r"\d+", words)[:3]]) / 255
    return np.where(light <= 0.04045, light / 12.92, ((light + 0.055) / 1.055) ** 2.4)


def oklab(light):
    """Björn Ottosson 2020: a distance of 0.02 is just seen between large fields."""
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_LMS) @ light)


def contrast(one, other):
    """WCAG 2.2: of graphics at least 3."""
    dark, light = sorted(float(each @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (light + 0.05) / (dark + 0.05)


def dots(tab):
    """The colour of each kind where it can be picked."""
    return {
        kind: tab.locator(f'.chip[data-kind="{kind}"]').evaluate(
            "chip => getComputedStyle(chip, '::before').backgroundColor"
        )
        for kind in KINDS
        if tab.locator(f'.chip[data-kind="{kind}"]').count()
    }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_any_reader_tells_the_kinds_apart(opened, dark):
    tab = opened(of_kinds(KINDS), dark=dark)
    colours = {kind: linear(words) for kind, words in dots(tab).items()}
    assert set(colours) == set(KINDS)
    for sight, matrix in SIGHT.items():
        seen = {kind: oklab(np.clip(np.array(matrix) @ light, 0, 1)) for kind, light in colours.items()}
        for one, other in itertools.combinations(KINDS, 2):
            assert np.linalg.norm(seen[one] - seen[other]) > 0.08, (sight, one, other)
    for ground in ("body", ".cell"):
        behind = linear(tab.eval_on_selector(ground, "node => getComputedStyle(node).backgroundColor"))
        for kind, light in colours.items():
            assert contrast(light, behind) >= 3, (ground, kind)


@pytest.mark.exhaustive
def test_a_kind_has_the_same_colour_on_every_page(opened):
    colours = dots(opened(of_kinds(KINDS)))
    for few in (KINDS[::-1], KINDS[3:5], KINDS[5:]):
        assert dots(opened(of_kinds(few))) == {kind: colours[kind] for kind in few}


def test_pictures_badges_and_distributions_show_a_kind_in_its_colour(opened):
    kind = "positional"
    tab = opened(of_kinds([kind]), state="head=0.0")
    (colour,) = dots(tab).values()
    shown = "node => getComputedStyle(node, '{}').backgroundColor"
    assert tab.eval_on_selector(".cell", shown.format("::after")) == colour
    assert tab.eval_on_selector("#focus-kind", shown.format("::before")) == colour
    red, green, blue = map(int, re.findall(r"\d+", colour))
    near = f"(n, at, all) => at % 4 === 0 && Math.hypot(n - {red}, all[at + 1] - {green}, all[at + 2] - {blue}) < 60"
    assert tab.eval_on_selector(
        "#spread canvas",
        "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
        f".filter({near}).length > 0",
    )
