"""The pages in a real browser: on a desk and on a phone, in light and in dark."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser, browser
from made_up import PAGES, lay_out, write_pages

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no chromium here (`apt-get install chromium`): pages are not looked at"
    ),
]

DESK, PHONE = 1280, 390
# Of each element that shows text: its colour, and that of the nearest ground behind it.
COLOURS = """
(() => {
  const opaque = colour => !/^rgba\\(.*, 0\\)$|^transparent$/.test(colour);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const ground = getComputedStyle(node).backgroundColor;
      if (opaque(ground)) return ground;
    }
    return 'rgb(255, 255, 255)';
  };
  const shown = [...document.body.querySelectorAll('*')].filter(node =>
    [...node.childNodes].some(child => child.nodeType == Node.TEXT_NODE && child.textContent.trim()));
  return shown.map(node => [node.tagName, getComputedStyle(node).color, behind(node)]);
})()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of many workers, with a class name that no line has room for."""
    folder = tmp_path_factory.mktemp("browser") / "project"
    lay_out(folder, changes={"phase2.peak_lr": 0.2}, seeds=tuple(range(9)), classes=("x" * 200, "shoe"))
    write_pages(folder)
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


def luminance(colour: str) -> float:
    """As WCAG defines it, of `rgb(…)`."""
    numbers = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in numbers)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("name", "width"), list(itertools.product(PAGES, (DESK, PHONE))))
def test_pictures_load_and_nothing_overflows(folder: Path, tab: Browser, name: str, width: int) -> None:
    tab.open(folder / name / "index.html", width=width, dark=False)
    tab.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")

    images: list[dict[str, Any]] = tab.evaluate(
        "[...document.images].map(i => ({loaded: i.naturalWidth, height: i.clientHeight, width: i.clientWidth}))"
    )
    assert images
    assert all(image["loaded"] > 0 and image["height"] > 100 and image["width"] >= 500 for image in images)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    # What is wider than the page scrolls in a box of its own, which is not.
    beyond = """
      [...document.body.querySelectorAll('*')]
        .filter(node => !node.parentElement.closest('.scroll, dt'))
        .filter(node => node.getBoundingClientRect().right > innerWidth + 1)
        .map(node => node.outerHTML.slice(0, 80))
    """
    assert tab.evaluate(beyond) == []
    assert {address.partition(":")[0] for address in tab.requests} <= {"file", "data"}


@pytest.mark.parametrize("name", PAGES)
def test_both_colour_schemes_can_be_read(folder: Path, tab: Browser, name: str) -> None:
    grounds = {}
    for dark in (False, True):
        tab.open(folder / name / "index.html", width=PHONE, dark=dark)
        found = tab.evaluate(COLOURS)
        assert len(found) > 20
        faint = [entry for entry in found if contrast(entry[1], entry[2]) < 4.5]
        assert faint == []
        grounds[dark] = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        pictures = tab.evaluate(
            "[...document.querySelectorAll('.picture')].map(box => getComputedStyle(box).backgroundColor)"
        )
        assert set(pictures) == {"rgb(255, 255, 255)"}  # their lines and letters are dark
    assert luminance(grounds[True]) < 0.05 < 0.9 < luminance(grounds[False])


def test_the_report_can_be_printed_with_all_params(folder: Path, tab: Browser) -> None:
    tab.open(folder / "report" / "index.html", width=DESK, dark=True)
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")
