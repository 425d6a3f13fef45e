"""The pipeline of the analysis, under real DVC."""

from __future__ import annotations

import re

import pytest
from conftest import Project

ANALYSIS = "analysis/dvc.yaml"


def ran(output: str) -> set[str]:
    return set(re.findall(r"Running stage '(?:analysis/dvc\.yaml:)?([^']+)'", output))


@pytest.mark.long
def test_the_analysis_runs_after_a_finished_run_and_each_part_again_only_for_its_own_params(finished: Project) -> None:
    assert not list((finished.root / "analysis").glob("*.json")), "the plain pipeline leaves the analysis alone"

    assert {"landscape", "cosine", "workers"} <= ran(finished.dvc("repro", ANALYSIS))

    for name in ("landscape", "cosine", "workers"):
        assert finished.json(f"analysis/{name}.json")["num_devices"] > 0
    assert [line for line in finished.run("git", "status", "--short").stdout.splitlines() if ".lock" not in line] == []
    assert ran(finished.dvc("repro", ANALYSIS)) == set()
    for param, stage in (("margin", "landscape"), ("gradient_images", "cosine"), ("subsets", "workers")):
        finished.set_params({f"analysis.{param}": 1 if param == "subsets" else 2})
        would_run = ran(finished.dvc("repro", "--dry", ANALYSIS))
        assert stage in would_run
        assert would_run <= {"landscape", "cosine", "workers", "analysis_page"}
        finished.set_params({f"analysis.{param}": {"margin": 0.3, "gradient_images": 100, "subsets": 2}[param]})
