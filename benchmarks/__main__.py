"""python -m benchmarks

Runs the benchmarks, prints the table and saves it in benchmarks/results.json.
"""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
import time
from pathlib import Path

import click

from benchmarks import results
from benchmarks.machine import about
from benchmarks.options import Options
from swap_pipeline.runtime.environment import num_cores

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = {
    "training_step": "the loop against a bare one, torchvision's and Lightning's",
    "precision": "torch.compile and bf16 against the default",
    "image_folder": "loading images from their files",
    "phase1": "two ranks against one process",
    "local_sgd": "two ranks over a slow link, an exchange every 16 steps against every step",
    "phase2": "two workers against two bare loops",
    "averaging": "time and memory, against reading and against timm, mergekit and load_file",
    "batchnorm": "the statistics pass against a forward pass",
    "startup": "to the first step, the launcher, swap --help",
    "nothing_to_do": "dvc repro against dvc status",
    "many_workers": "what each of 64 and 256 workers adds besides training",
    "whole_run": "dvc repro of the default recipe against bare loops",
    "landscape": "grid points, and what of their time is not forward passes",
    "growth": "averaging, phase 2, data order and index against size; draws docs/figures/growth.svg",
}
_LISTED = "\n".join(f"  {name:15} {what}" for name, what in FAMILIES.items())


@click.command(
    help="Measure this pipeline's speed against a bare loop, a limit and other libraries.\n\n"
    "\b\nBenchmarks, by NAME:\n"
    f"{_LISTED}\n\n"
    "Things that are compared take turns, after a warm-up round; values are medians, and ratios are computed for each "
    "round. Rows are saved one by one, so an interrupted run keeps its rows; without --only, old rows are removed. "
    "Needs 4 GB of disk while it runs.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--only",
    "names",
    multiple=True,
    metavar="NAME",
    type=click.Choice(list(FAMILIES)),
    help="Only this one; may be repeated. Other rows are kept.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds of measurements.")
@click.option("--quick", is_flag=True, help="Tiny sizes, a minute or two: only checks that benchmarks run.")
@click.option(
    "--cifar",
    type=click.Path(exists=True, path_type=Path),
    help="CIFAR-10 as images, train/<class>/*.jpg and test/<class>/*.jpg: a folder, or a tar of one; without "
    "it, its rows are left out.",
)
@click.option(
    "--photos",
    type=click.Path(exists=True, path_type=Path),
    help="Photographs like ImageNet's, 500 × 375 pixels, in a folder or a tar like CIFAR-10's; without it, such images "
    "are generated.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / ".swap" / "bench",
    help="Folder for temporary files.  [default: .swap/bench]",
)
@click.option(
    "--results",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the rows.  [default: benchmarks/results.json; with --quick, results.json in --folder]",
)
@click.option("--show", is_flag=True, help="Only print the table of the saved rows.")
def main(
    names: tuple[str, ...],
    rounds: int,
    quick: bool,
    cifar: Path | None,
    photos: Path | None,
    folder: Path,
    path: Path | None,
    show: bool,
) -> None:
    if path is None:
        path = folder / "results.json" if quick else results.RESULTS
    if not show:
        if not names:
            path.unlink(missing_ok=True)  # the rows of one run, and none of those before
        given = Options(
            rounds=rounds, quick=quick, scratch=folder.resolve(), cores=num_cores(), cifar=cifar, photos=photos
        )
        failed = measure(names or tuple(FAMILIES), given, path=path)
    if not path.exists():
        raise click.ClickException(f"there is no {path}: measure first")
    click.echo(results.table(results.read(path)))
    if not show and failed:
        raise click.ClickException(f"could not be measured: {', '.join(failed)}")


def measure(names: tuple[str, ...], given: Options, *, path: Path) -> list[str]:
    """Measure these families one after the other; returns those that failed."""
    failed, folder = [], given.scratch
    facts = {**about(), "rounds": given.rounds, "quick": given.quick}
    for number, name in enumerate(names, start=1):
        began = time.monotonic()
        print(f"[{number}/{len(names)}] {name}: {FAMILIES[name]}", file=sys.stderr, flush=True)
        scratch = folder / name
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        options = dataclasses.replace(given, scratch=scratch)
        try:
            for row in importlib.import_module(f"benchmarks.{name}").measure(options):
                results.keep(path, facts, [row], order=list(FAMILIES))
                median = "–" if row.ratio is None else results.number(row.ratio.median)
                print(f"  {row.what}: {median}", file=sys.stderr, flush=True)
        except Exception as error:  # the rest must still run
            failed.append(name)
            print(f"  failed: {error}", file=sys.stderr, flush=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return failed


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
