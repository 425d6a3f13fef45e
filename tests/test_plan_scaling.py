"""The model of scaling: against arithmetic by hand, and the page that shows it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from conftest import ROOT

from swap_pipeline.cli.main import main
from swap_pipeline.cli.plan.scaling import Hardware, ring_seconds, scaling, tables

SIMPLE = Hardware(
    link_bytes_per_second=1e9,
    latency_seconds=0.001,
    reader_bytes_per_second=1e9,
    files_bytes_per_second=2e9,
    hash_bytes_per_second=0.5e9,
    check_bytes_per_second=4e9,
    gpus_per_node=2,
)


def test_a_ring_sends_almost_twice_the_bytes_and_two_messages_to_everybody_else() -> None:
    assert ring_seconds(2_000_000_000, 4, SIMPLE) == pytest.approx(2 * 3 / 4 * 2 + 6 * 0.001)
    assert ring_seconds(2_000_000_000, 1, SIMPLE) == 0


def test_the_exchange_hides_behind_two_thirds_of_a_step() -> None:
    def step(compute: float) -> float:
        found = scaling(
            gradient_bytes=2_000_000_000,
            state_bytes=0,
            num_models=1,
            devices=4,
            compute_seconds=compute,
            hardware=SIMPLE,
        )
        assert found.efficiency == pytest.approx(compute / found.step_seconds)
        return found.step_seconds

    assert step(9.0) == 9.0
    assert step(3.0) == pytest.approx(3.0 + 3.006 - 2.0)


def test_files_grow_with_workers_and_with_nodes() -> None:
    found = scaling(
        gradient_bytes=1,
        state_bytes=1_000_000_000,
        num_models=3,
        devices=16,
        compute_seconds=1.0,
        hardware=SIMPLE,
    )
    assert found.worker_bytes == 3_000_000_000
    assert found.averaging_seconds == pytest.approx(4.0)
    assert found.loading_seconds == pytest.approx(8 * 1 / 2)
    assert found.checking_seconds == pytest.approx(8 * 3 / 2)
    assert found.hashing_seconds == pytest.approx(6.0)


def test_the_page_shows_what_the_model_gives() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    for table in tables().split("\n\n"):
        assert table in page


@pytest.mark.parametrize(("gpus", "seconds"), [(16, 0.512), (4, 2.048)])
def test_swap_plan_computes_the_same_numbers_for_params(gpus: int, seconds: float) -> None:
    recipe = str(ROOT / "recipes" / "imagenet.yaml")
    options = ["--gpus", str(gpus), "--nodes", "2", "--images-per-second", "1000", "--link", "12.5", "--json"]
    done = CliRunner().invoke(main, ["plan", "--params", recipe, *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    bits = found["scaling"]
    assert bits["compute_seconds"] == pytest.approx(seconds)  # 8,192 images on so many GPUs
    sent = 2 * (gpus - 1) / gpus * found["network"]["gradient_bytes"]
    assert bits["exchange_seconds"] == pytest.approx(sent / 12.5e9 + 2 * (gpus - 1) * 5e-6)
