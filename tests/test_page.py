"""The pages: whole in one file, nothing of the data taken for markup, numbers as recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest
from conftest import ROOT
from made_up import PAGES, landscape_record, lay_out, swap_records, training_record, workers_record, write_pages
from markupsafe import escape

from swap_pipeline.report import provenance
from swap_pipeline.report.analysis_page import analysis_page, draw_analysis
from swap_pipeline.report.page import TEMPLATES, from_markdown, render
from swap_pipeline.report.summary import (
    RESULT_COLUMNS,
    closing_words,
    models_before_averaging,
    result_rows,
    result_table,
    summarise,
)
from swap_pipeline.storage.files import write_json

FOLDER = ROOT / "swap_pipeline" / "report" / "templates"
EVIL = "<script>alert('x')</script> & \"quotes\""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three pages, with names that a page must not take for markup."""
    folder = lay_out(
        tmp_path_factory.mktemp("pages") / "project",
        changes={"phase2.peak_lr": 0.2, "model.options": {"<b>depth</b>": 3}},
        classes=(EVIL, "shoe"),
    )
    record = json.loads((folder / "metrics/phase1.json").read_text())
    write_json(folder / "metrics/phase1.json", {**record, "devices": "2 × <i>cpu</i>"})
    write_pages(folder)
    return folder


class Reader(HTMLParser):
    """Collects tags with their attributes, and checks that each is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "meta"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"th", "td"} & set(self._open):
            self.rows[-1][-1] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def read(folder: Path, name: str) -> str:
    return (folder / name / "index.html").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_nothing_but_itself(written: Path, name: str) -> None:
    text = read(written, name)
    page = Reader(text)
    assert not re.search(r"https?://|//\w+\.\w|url\(|@import", text)
    assert {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "svg"} == set()
    images = page.named("img")
    assert images
    for image in images:
        assert (image["src"] or "").startswith("data:image/svg+xml;base64,")
        assert len(image["alt"] or "") > 40
    assert page.named("html") == [{"lang": "en"}]
    assert next(tag for tag, _ in page.tags if tag in ("h1", "h2", "h3")) == "h1"
    assert len(page.named("h1")) == 1
    (policy,) = [meta for meta in page.named("meta") if meta.get("http-equiv")]
    assert (policy["content"] or "").startswith("default-src 'none'")


def test_nothing_of_the_data_is_taken_for_markup(written: Path) -> None:
    text = read(written, "report")
    for hostile in (EVIL, "model.options.<b>depth</b>", "2 × <i>cpu</i>"):
        assert hostile not in text
        assert escape(hostile) in text


@pytest.mark.parametrize(
    "content",
    [
        "{{ evil }}",
        "{{ evil|markdown }}",
        "{% call picture('x') %}{{ evil }}{% endcall %}",
        "{{ table((evil,), [(evil, evil)], caption=evil, classes={0: evil}, strong={0: [1]}) }}",
    ],
)
def test_a_template_escapes_whatever_is_put_into_it(content: str) -> None:
    blocks = {"title": "{{ evil }}", "lead": "{{ evil }}", "content": content}
    text = "".join(f"{{% block {name} %}}{inside}{{% endblock %}}" for name, inside in blocks.items())
    template = TEMPLATES.from_string(f"{{% extends 'base.html' %}}{text}")
    page = Reader(found := template.render(evil=f"{EVIL} <b>", files=EVIL, images={"x": {"src": EVIL, "alt": EVIL}}))
    assert {tag for tag, _ in page.tags} & {"script", "b"} == set()
    assert '"quotes"' not in found and f"<title>{escape(EVIL)} &lt;b&gt;</title>" in found


def test_no_template_says_that_something_is_safe_already() -> None:
    texts = {name: (FOLDER / name).read_text() for name in TEMPLATES.list_templates()}
    assert set(texts) == {"base.html", *(f"{name}.html" for name in PAGES)}
    assert [name for name, text in texts.items() if re.search(r"\|\s*safe|autoescape|Markup", text)] == []


def test_of_markdown_a_page_knows_code_and_emphasis() -> None:
    assert from_markdown("`<a>` is *not* **b**") == "<code>&lt;a&gt;</code> is <em>not</em> <strong>b</strong>"


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'recipe' is undefined"):
        render("tables.html")


def test_the_report_shows_the_numbers_of_the_records(written: Path) -> None:
    records, text = swap_records(), read(written, "report")
    swap = records["phase3"]["test_accuracy"]
    accuracies = [worker["test_accuracy"] for worker in records["workers"].values()]
    assert f"<dd>{swap:.2f} %</dd>" in text
    assert f"<dd>{swap - sum(accuracies) / 4:+.2f} points</dd>" in text
    assert "<dd>1 min 54 s</dd>" in text  # 63.6 + 49 + 1.2 seconds
    rows = Reader(text).rows
    for seed, worker in records["workers"].items():
        expected = [f"worker, seed {seed}", f"{worker['test_accuracy']:.2f}", f"{worker['test_loss']:.4f}",
                    f"{worker['seconds']:.1f}", "1 × cpu"]  # fmt: skip
        assert expected in rows
    assert ["critical path", "", "", "113.8", ""] in rows
    for command in ("swap compare", "dvc --cd analysis repro"):
        assert f"<code>{command}</code>" in text


def test_metrics_are_flat_and_of_the_final_model(written: Path) -> None:
    records, metrics = swap_records(), json.loads((written / "metrics/swap.json").read_text())
    accuracies = [records["workers"][seed]["curve"][-1]["accuracy"] for seed in (0, 1, 2, 3)]
    assert metrics == {
        "accuracy": records["phase3"]["test_accuracy"],
        "loss": records["phase3"]["test_loss"],
        "workers": pytest.approx(sum(accuracies) / 4),
        "phase1": records["phase1"]["curve"][-1]["accuracy"],
        "seconds": pytest.approx(63.6 + 49 + 1.2),  # the slowest worker is the last one
    }


def test_with_cycles_each_worker_has_a_model_for_every_one_of_them() -> None:
    phase1 = training_record([50.0], seconds=9)
    workers = {
        3: training_record([60, 61, 62, 70], seconds=5, cycles=2),
        8: training_record([63, 65, 66, 72], seconds=4, cycles=2),
    }
    phase3 = {"models": 4, "test_accuracy": 75.0, "test_loss": 0.4, "seconds": 1.0}

    models = models_before_averaging(phase1, workers)
    assert [model["test_accuracy"] for model in models] == [61, 70, 65, 72]
    summary = summarise(phase1, workers, phase3)
    assert summary == {"accuracy": 75.0, "loss": 0.4, "workers": 67.0, "phase1": 50.0, "seconds": 15.0}
    names = {row.name: row.cells for row in result_rows(phase1, workers, phase3)}
    # 61, 70, 65 and 72 are 6, 3, 2 and 5 from their mean: √(74 / 3)
    assert names["mean of 4 models"][1] == "67.00 ± 4.97"
    assert names["average of 4 models"][1] == "75.00"


@pytest.fixture(scope="module")
def without_phase2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with 0 epochs of phase 2."""
    folder = lay_out(tmp_path_factory.mktemp("plain") / "project", seeds=(0,), epochs=0)
    write_pages(folder, "report")
    return folder


def test_without_phase_2_the_final_model_is_phase_1s(without_phase2: Path) -> None:
    metrics = json.loads((without_phase2 / "metrics/swap.json").read_text())
    accuracy = swap_records()["phase1"]["test_accuracy"]
    assert [metrics[key] for key in ("accuracy", "workers", "phase1")] == [accuracy] * 3
    assert metrics["seconds"] == pytest.approx(63.6 + 1.2)
    numbers = json.loads((without_phase2 / "report/report.json").read_text())
    assert [row["name"] for row in numbers["table"]] == [
        "phase 1 (20 epochs, τ passed)",
        "final model",
        "critical path",
    ]
    curves = (without_phase2 / "plots/curves.csv").read_text().splitlines()
    assert {line.split(",")[0] for line in curves} == {"run", "phase1"}


def test_the_report_says_nothing_of_a_phase_2_that_there_is_not(without_phase2: Path) -> None:
    text = read(without_phase2, "report")
    before_params = text[: text.index("<h2>Params")]
    assert "phase 2" not in re.sub(r'src="[^"]*"', "", before_params)
    for words in ("gain over", "slowest worker:", "keep_epochs", "<strong>worker</strong>", "<strong>average</strong>"):
        assert words not in before_params
    assert "<strong>final model</strong>" in before_params


def test_the_report_tells_what_differs_from_the_recipe(written: Path) -> None:
    page = Reader(read(written, "report"))
    assert ["phase2.peak_lr", "0.2", "0.1"] in page.rows
    assert ["model.options.<b>depth</b>", "3", "– (not set)"] in page.rows
    assert ["phase2.epochs", "8"] in page.rows
    marked = [attributes for attributes in page.named("tr") if attributes.get("class") == "marked"]
    assert len(marked) == 1 + 2  # SWAP's row, and both in the list of all params


def test_a_recipe_that_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    tree = {"recipe": "../birds", "data": {"name": "x"}}
    assert provenance.origin_of(tree, recipes=tmp_path / "recipes") == provenance.Origin(
        recipe="../birds", problem=f"there is no {tmp_path}/recipes/../birds.yaml to compare with", changes=()
    )
    (tmp_path / "recipes" / "birds.yaml").write_text("a: [")
    assert "cannot be read" in (provenance.origin_of({"recipe": "birds"}, recipes=tmp_path / "recipes").problem or "")


@pytest.mark.parametrize(
    "recipe", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml") if "." not in path.stem)
)
def test_a_recipe_differs_in_nothing_from_itself(recipe: str) -> None:
    tree = provenance.read_sections(ROOT / "recipes" / f"{recipe}.yaml")
    assert provenance.origin_of(tree, recipes=ROOT / "recipes").changes == ()


def test_changes_are_by_value_not_by_spelling() -> None:
    changes = provenance.changes_of(
        {"a": {"b": 0.0005, "c": [1, 2], "e": True}, "n": 1}, {"a": {"b": 5e-4, "c": [1, 3], "d": "x", "e": True}}
    )
    assert [(c.key, c.here, c.recipe) for c in changes] == [
        ("a.c", "[1, 2]", "[1, 3]"),
        ("n", "1", None),
        ("a.d", None, "x"),
    ]


def test_the_numbers_stand_beside_the_page_as_json(written: Path) -> None:
    numbers, records = json.loads((written / "report/report.json").read_text()), swap_records()
    assert numbers["records"]["phase2"]["3"] == records["workers"][3]
    assert numbers["summary"] == json.loads((written / "metrics/swap.json").read_text())
    assert [row["name"] for row in numbers["table"]][-2:] == ["average of 4 workers", "critical path"]
    assert numbers["params"]["phase2"]["peak_lr"] == 0.2
    assert {"key": "phase2.peak_lr", "here": "0.2", "recipe": "0.1"} in numbers["origin"]["changes"]
    assert numbers["environment"]["code"]["commit"] is None  # not in a git repository
    assert numbers["environment"]["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_the_text_table_and_the_page_have_the_same_rows(written: Path) -> None:
    records = swap_records()
    rows = result_rows(records["phase1"], records["workers"], records["phase3"])
    lines = result_table(rows).splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]] == [
        [cell for column, cell in zip(RESULT_COLUMNS, r.cells, strict=True) if column != "validation accuracy"]
        for r in rows
    ]
    assert result_table(rows) in (written / "report/summary.md").read_text()
    shown = Reader(read(written, "report")).rows
    assert all([*row.cells[:3], row.cells[4]] in [cells[:4] for cells in shown] for row in rows)


@pytest.mark.parametrize("dirty", [False, True])
def test_the_commit_is_told_and_what_differs_from_it(
    dirty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("params.yaml", "dvc.lock", "metrics/swap.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    identity = ("-c", "user.name=T", "-c", "user.email=t@example.org")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-qm", "start")):
        subprocess.run(("git", *command), check=True)
    for name in ("dvc.lock", "metrics/swap.json", *(["params.yaml"] if dirty else [])):
        (tmp_path / name).write_text("new")  # the first two are written by every run
    (tmp_path / "untracked").write_text("")
    head = subprocess.run(("git", "rev-parse", "HEAD"), capture_output=True, text=True, check=True).stdout.strip()
    monkeypatch.setenv("DVC_EXP_NAME", "gentle")
    monkeypatch.delenv("DVC_EXP_BASELINE_REV", raising=False)
    expected = {"commit": head, "changed": ["params.yaml"] if dirty else [], "experiment": "gentle", "baseline": None}
    assert provenance.code_version() == expected


def test_the_page_of_tables_has_them_with_the_best_in_bold(written: Path) -> None:
    text = read(written, "tables")
    rows = Reader(text).rows
    assert ["SGD (small-batch)", "2", "91.05 ± 0.07", "2", "152.5 ± 0.7", "305.0 ± 1.4", "+0.20"] in rows
    assert "<strong>91.25 ± 0.07</strong>" in text  # small-batch SWA
    assert "<title>SWAP, plain training and SWA</title>" in text
    assert text.count("data:image/svg+xml") == 2


def test_the_report_says_what_ended_phase_1(written: Path) -> None:
    words = " ".join(read(written, "report").split())
    assert "Phase 1 was left after epoch 20 by accuracy: training accuracy 91.20 %, above 91 %." in words


def test_the_analysis_page_shows_marks_and_last_points(written: Path) -> None:
    rows = Reader(read(written, "analysis")).rows
    assert ["plateau", "14", "15", "0.00"] in rows
    marks = landscape_record()["planes"][1]["marks"]
    swap = marks[3]
    assert ["SWAP", f"{swap['train_error']:.2f}", f"{swap['test_error']:.2f}", "2.50"] in rows
    assert ["worker 2", f"{marks[2]['train_error']:.2f}", f"{marks[2]['test_error']:.2f}", "on it"] in rows
    assert [row[:2] for row in rows if row[0] == "phase 1"] == [["phase 1", "20"]]


def test_what_was_not_analysed_is_told_with_the_remedy() -> None:
    nothing = analysis_page({}, drawings={}, pictures={})
    for stage in ("landscape", "cosine", "workers", "exits"):
        assert f"<code>dvc --cd analysis repro {stage}</code>" in nothing
    records = {
        "landscape": {**landscape_record(), "planes": [], "left_out": [{"name": "workers", "why": "only 2 <workers>"}]},
        "cosine": {"points": [], "images": 100},
        "workers": workers_record(seeds=(0,)),
    }
    drawings = draw_analysis(records)
    assert [drawing.name for drawing in drawings] == ["workers_accuracy"]
    text = analysis_page(records, drawings={d.name: d for d in drawings}, pictures={"workers_accuracy": b""})
    assert "The plane workers is left out: only 2 &lt;workers&gt;." in text
    assert "<code>phase1.keep_epochs</code>" in text
    assert "add seeds to <code>workers.seeds</code>" in text


def test_a_report_of_missing_records_ends_in_one_line(tmp_path: Path) -> None:
    folder = lay_out(tmp_path / "project")
    (folder / "metrics/phase3.json").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "stages.report"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: metrics/phase3.json is missing") and len(done.stderr.splitlines()) == 1


def closing(records: Any, *, accuracy: float = 90.78, since: float | None, experiment: str | None = None) -> list[str]:
    numbers = {"accuracy": accuracy, "workers": 90.49, "phase1": 88.99}
    return closing_words(
        records["phase1"],
        records["workers"],
        numbers,
        since=since,
        experiment=experiment,
        is_temporary=experiment is not None,
    ).splitlines()


def test_a_run_ends_with_what_was_trained_what_came_out_and_what_to_do_next() -> None:
    records = swap_records(seeds=(0, 3, 8))
    ended = {8: 900.0, 3: 2000.0, 0: 500.0}
    for seed, worker in records["workers"].items():
        worker["ran"] = [0.0, ended[seed]]
    records["phase1"]["ran"] = [0.0, 400.0]
    assert closing(records, since=900.0) == [
        "trained: workers 3, 8",
        "reused:  phase 1, worker 0",
        "result:  90.78 % test accuracy, 1.79 points above phase 1, 0.29 points above the workers' mean",
        "model:   checkpoints/phase3/model.safetensors",
        "report:  report/index.html",
        'next:    git add -A && git commit -m "A run to compare with"',
        "         dvc exp run --temp -n NAME -S PARAM=VALUE  (`swap params` lists them)",
    ]
    by_hand = closing(records, since=None, experiment="gentle", accuracy=90.4)
    assert by_hand[0].endswith("1.41 points above phase 1, 0.09 points below the workers' mean")
    assert by_hand[1:] == [
        "report:  run `dvc exp apply gentle`, then open report/index.html",
        "note:    the average is no better than its workers: see docs/choosing-tau.md",
        "next:    dvc exp show --only-changed --drop '.*/'",
    ]


def test_a_run_without_phase_2_ends_with_its_accuracy_alone() -> None:
    records = swap_records(seeds=(0,), epochs=0)
    assert closing(records, since=1.0)[:2] == ["trained: phase 1", "result:  90.78 % test accuracy"]
