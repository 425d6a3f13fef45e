"""Self-contained HTML pages: styles and figures inside, no scripts, no network.

Templates are in `templates/`; the modules named after pages collect their contents, which are escaped.
"""

from __future__ import annotations

import base64
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from swap_pipeline.report.durations import duration
from swap_pipeline.report.figures import Drawing


def render(template: str, **values: Any) -> str:
    """A rendered template; a missing value is an error."""
    return TEMPLATES.get_template(template).render(values)


def images(drawings: Iterable[Drawing], pictures: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """The attributes of each drawing's `<img>`; `pictures` are the drawings' SVGs."""
    return {drawing.name: _image(drawing.alt, pictures[drawing.name]) for drawing in drawings}


def _image(alt: str, svg: bytes) -> dict[str, Any]:
    size = re.search(rb'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    width, height = (round(float(length) * 4 / 3) for length in size.groups()) if size else (None, None)
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return {"src": source, "alt": alt, "width": width, "height": height}


def from_markdown(text: str) -> Markup:
    """Markdown's `code`, **strong** and *emphasis*."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    marked = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked)
    return Markup(re.sub(r"\*([^*]+)\*", r"<em>\1</em>", marked))


def _signed(points: float) -> str:
    return f"{points:+.2f}".replace("-", "−")


def _number(count: Any) -> str:
    return f"{count:,}" if isinstance(count, int) else str(count)


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {
    "duration": duration,
    "markdown": from_markdown,
    "mean": statistics.fmean,
    "number": _number,
    "signed": _signed,
}
