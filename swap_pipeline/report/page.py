"""Pages that need nothing but themselves: one HTML file with its pictures and styles in it, no script, no network.

Everything that is put into a page is escaped unless it is `Html`, which only the functions here make.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swap_pipeline.report.figures import Drawing

_VOID = ("img", "meta")


class Html(str):
    """Text that is markup already."""


def element(tag: str, *content: Any, **attributes: Any) -> Html:
    """`element("p", "a < b", class_="note")`; attributes that are None are left out."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    end = "" if tag in _VOID else f"</{tag}>"
    return Html(f"<{tag}{written}>{joined(content)}{end}")


def joined(content: Iterable[Any]) -> Html:
    return Html("".join(part if isinstance(part, Html) else html.escape(str(part)) for part in content))


def from_markdown(text: str) -> Html:
    """Of Markdown, `code`, **strong** and *emphasis*."""
    marked = html.escape(text)
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", marked)
    marked = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked)
    return Html(re.sub(r"\*([^*]+)\*", r"<em>\1</em>", marked))


def paragraph(text: str, *, class_: str | None = None) -> Html:
    return element("p", from_markdown(text), class_=class_)


def bullets(lines: Iterable[str]) -> Html:
    return element("ul", *(element("li", from_markdown(line)) for line in lines))


def section(title: str, *content: Html) -> Html:
    return element("section", element("h2", title), *content)


def tiles(facts: Sequence[tuple[str, str, str]]) -> Html:
    """Headline figures: what, how much, and a word on it."""
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value), element("dd", words, class_="words"))
            for name, value, words in facts
        ),
        class_="tiles",
    )


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    caption: str,
    marked: Iterable[int] = (),
    faint: Iterable[int] = (),
    numbers: bool = True,
) -> Html:
    """The first column names the rows; the others are numbers, flush right, or text. Wide ones scroll in their box.

    Without names of columns there is no head.
    """
    head = element("thead", element("tr", *(element("th", column, scope="col") for column in columns)))
    classes = {**dict.fromkeys(faint, "faint"), **dict.fromkeys(marked, "marked")}
    body = (
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell) for cell in row[1:]),
            class_=classes.get(index),
        )
        for index, row in enumerate(rows)
    )
    content = element(
        "table",
        *([head] if columns else []),
        element("tbody", *body),
        class_="numbers" if numbers else "text",
        aria_label=caption,
    )
    # The caption stays where it is while the table scrolls.
    box = element("div", content, class_="table scroll", role="region", aria_label=caption, tabindex="0")
    return joined([element("p", caption, class_="caption"), box])


def picture(drawing: Drawing, svg: bytes, *, caption: str, files: str) -> Html:
    """On a light ground in both colour schemes; `files` says where it is found as files."""
    size = re.search(rb'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    width, height = (round(float(length) * 4 / 3) for length in size.groups()) if size else (None, None)
    image = element(
        "img",
        src=f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}",
        alt=drawing.alt,
        width=width,
        height=height,
    )
    where = element("span", f"{files}/{drawing.name}.svg, .png, .csv", class_="files")
    return element(
        "figure",
        element("div", image, class_="picture scroll", role="region", aria_label="Picture", tabindex="0"),
        element("figcaption", from_markdown(caption), " ", where),
    )


def commands(lines: Mapping[str, str]) -> Html:
    """What to type, and what it gives."""
    return element(
        "dl",
        *(
            element("div", element("dt", element("code", command)), element("dd", from_markdown(words)))
            for command, words in lines.items()
        ),
        class_="commands",
    )


def folded(title: str, *content: Html) -> Html:
    return element("details", element("summary", title), *content)


def page(title: str, *, lead: str, content: Iterable[Html]) -> str:
    """The whole file. Its policy forbids scripts and whatever comes from elsewhere."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'; img-src data:",
        ),
        element("title", title),
        element("style", Html(_STYLE)),
    )
    body = element(
        "body",
        element("header", element("h1", title), paragraph(lead, class_="lead")),
        element("main", *content),
        element("footer", paragraph("SWAP: Gupta, Akle Serrano, DeCoste, ICLR 2020, arXiv 2001.02312.")),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


_STYLE = """
:root {
  --ground: #ffffff; --text: #1c2126; --quiet: #56606a; --line: #d5dade; --box: #f3f5f7; --accent: #00639b;
  --mark: #fdf0cf; --picture: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #15181b; --text: #e7eaec; --quiet: #a9b2ba; --line: #383f45; --box: #1f2428; --accent: #77c3f0;
    --mark: #453a1c; --picture: #ffffff;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 60rem; background: var(--ground); color: var(--text);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: break-word;
}
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.75rem 0 0.75rem; }
h3 { font-size: 1.05rem; margin: 1.75rem 0 0.5rem; }
p, ul { margin: 0.75rem 0; max-width: 46rem; }
ul { padding-left: 1.2rem; }
li { margin: 0.2rem 0; }
.lead { color: var(--quiet); font-size: 1.05rem; }
code {
  font: 0.9em ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  background: var(--box); border-radius: 4px; padding: 0.1em 0.35em;
}
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: 0.75rem; margin: 1.5rem 0; }
.tiles > div { background: var(--box); border-radius: 10px; padding: 0.9rem 1.1rem; }
.tiles dt { color: var(--quiet); font-size: 0.9rem; }
.tiles dd { margin: 0; font-size: 1.9rem; font-weight: 650; line-height: 1.25; color: var(--accent); }
.tiles dd.words { font-size: 0.9rem; font-weight: 400; color: var(--text); line-height: 1.45; }
.scroll { overflow-x: auto; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
figure { margin: 1.25rem 0; }
.picture { background: var(--picture); border: 1px solid var(--line); border-radius: 10px; padding: 0.75rem; }
.picture img { display: block; width: 100%; min-width: 36rem; max-width: 54rem; height: auto; margin: 0 auto; }
figcaption { color: var(--quiet); font-size: 0.92rem; margin-top: 0.5rem; max-width: 46rem; }
.files { display: block; font-size: 0.82rem; }
table { border-collapse: collapse; min-width: 100%; font-size: 0.95rem; }
.caption { color: var(--quiet); font-size: 0.92rem; margin: 1.5rem 0 0.25rem; }
.table {
  background:
    linear-gradient(to right, var(--ground) 40%, transparent) left / 2.5rem 100% no-repeat local,
    linear-gradient(to left, var(--ground) 40%, transparent) right / 2.5rem 100% no-repeat local,
    linear-gradient(to right, var(--line), transparent) left / 0.8rem 100% no-repeat scroll,
    linear-gradient(to left, var(--line), transparent) right / 0.8rem 100% no-repeat scroll;
}
th, td { padding: 0.4rem 0.7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid var(--line); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 400; }
.numbers th + th, .numbers td { text-align: right; font-variant-numeric: tabular-nums; }
.numbers td { white-space: nowrap; }
.numbers tbody th { min-width: 9rem; }
.text tbody th { white-space: nowrap; }
.text td { overflow-wrap: anywhere; min-width: 5.5rem; }
tr.marked > * { background: var(--mark); font-weight: 600; }
tr.faint > * { color: var(--quiet); font-style: italic; }
.commands div { padding: 0.6rem 0; border-bottom: 1px solid var(--line); }
.commands dt { overflow-x: auto; white-space: nowrap; }
.commands dd { margin: 0.25rem 0 0; }
details { margin: 1rem 0; }
summary { cursor: pointer; color: var(--accent); padding: 0.25rem 0; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); color: var(--quiet); font-size: 0.88rem; }
@media (max-width: 34rem) {
  body { padding: 1.25rem 1rem 2rem; }
  h1 { font-size: 1.55rem; }
  .tiles { grid-template-columns: 1fr; }
  th, td { padding: 0.35rem 0.5rem; }
  figcaption::before { content: "Swipe the picture to see all of it. "; }
}
@media print {
  :root {
    --ground: #ffffff; --text: #000000; --quiet: #444444; --line: #bbbbbb; --box: #f3f5f7; --accent: #00639b;
    --mark: #fdf0cf;
  }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .scroll { overflow: visible; }
  .picture img { min-width: 0; }
  figure, tr, .tiles > div { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""
