"""The style sheet's colours can be read, in light and dark, and by those who see fewer of them."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import numpy as np
import numpy.typing as npt
import pytest

Colour = npt.NDArray[np.float64]
SHEET = files("diffcheck.report").joinpath("templates/page.css").read_text()
#: Linear RGB as dichromats see it (Viénot, Brettel and Mollon 1999).
PROTANOPE = np.array([[0.1124, 0.8876, 0], [0.1124, 0.8876, 0], [0.0040, -0.0040, 1]])
DEUTERANOPE = np.array([[0.2927, 0.7073, 0], [0.2927, 0.7073, 0], [-0.0223, 0.0223, 1]])


def palette(theme: str) -> dict[str, Colour]:
    """Name -> linear RGB. The dark theme replaces the light one's values."""
    light, dark = SHEET.split("@media (prefers-color-scheme: dark)", 1)
    found: dict[str, str] = {}
    for part in (light,) if theme == "light" else (light, dark.split("* {")[0]):
        found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", part))
    return {name: linear(text) for name, text in found.items()}


def linear(text: str) -> Colour:
    digits = text[1:] if len(text) == 7 else "".join(2 * c for c in text[1:])
    srgb = np.array([int(digits[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def contrast(a: Colour, b: Colour) -> float:
    """WCAG 2.2's ratio of relative luminances, 1 to 21."""
    low, high = sorted(float(c @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (a, b))
    return high / low


def distance(a: Colour, b: Colour) -> float:
    """CIE 1976 colour difference in L*a*b*; about 2 is just noticeable."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])

    def lab(c: Colour) -> Colour:
        x, y, z = np.cbrt(to_xyz @ np.clip(c, 0, 1) / [0.9505, 1.0, 1.089])
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    return float(np.linalg.norm(lab(a) - lab(b)))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read(theme: str) -> None:
    c = palette(theme)
    for name in ("ink", "muted", "equal", "origin", "receiver", "unobserved", "s1", "s2", "s3", "s4", "s5", "s6"):
        assert contrast(c[name], c["paper"]) >= 4.5, name
    assert contrast(c["ink"], c["raised"]) >= 4.5 and contrast(c["ink"], c["receiver-fill"]) >= 4.5
    assert contrast(c["on-origin"], c["origin-fill"]) >= 4.5
    assert contrast(c["faint"], c["paper"]) >= 3, "edges of the graph"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("eye", [np.eye(3), PROTANOPE, DEUTERANOPE], ids=["all", "protanope", "deuteranope"])
def test_statuses_look_different(theme: str, eye: Colour) -> None:
    c = {name: eye @ value for name, value in palette(theme).items()}
    fills = {"equal": c["equal"], "origin": c["origin-fill"], "receiver": c["receiver-fill"], "paper": c["paper"]}
    for a, b in itertools.combinations(fills, 2):
        assert distance(fills[a], fills[b]) > 12, (a, b)
    assert contrast(c["origin-fill"], c["receiver-fill"]) > 1.9, "even in grey"
