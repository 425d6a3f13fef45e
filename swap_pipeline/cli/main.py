"""The `swap` command."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from swap_pipeline import __version__
from swap_pipeline.errors import NEW_LINES, SwapError, printable, shown
from swap_pipeline.runtime.last_resort import HANDLED, open_closed_streams, report

TABLES = Path("tables")
FINAL_MODEL = Path("checkpoints/phase3/model.safetensors")


def _say(text: str, *, err: bool = False) -> None:
    """Print, without what names in files could do to a terminal."""
    click.echo(printable(text, keep=NEW_LINES), err=err)


class _Commands(click.Group):
    """Errors come as one line, unless they are bugs."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        open_closed_streams()
        return super().main(*arguments, **options)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except SwapError as error:
            _say(f"error: {error}", err=True)
            sys.exit(1)
        except HANDLED as error:
            if isinstance(error, BrokenPipeError):  # the reader has closed the pipe; click handles it
                raise
            report(error, doing=f"swap {ctx.invoked_subcommand}")
            sys.exit(1)


params_option = click.option(
    "--params",
    "file",
    type=click.Path(path_type=Path),
    default=Path("params.yaml"),
    show_default=True,
    help="Params file, or any recipe.",
)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="swap")
def main() -> None:
    """SWAP: train with large batches, refine in parallel with small ones, average.

    DVC runs the pipeline itself: `dvc repro`. These commands complement it.
    """


@main.command()
@click.argument("name", required=False)
@click.option("--force", is_flag=True, help="Overwrite uncommitted edits of params.yaml.")
def use(name: str | None, force: bool) -> None:
    """Write the recipe NAME to params.yaml; without NAME, list the recipes.

    A recipe is a complete params file: one of the paper's experiments, or a smaller one. params.yaml is not
    overwritten if that would lose edits.
    """
    from swap_pipeline.cli.recipes import data_needed, list_recipes, recipe_of_params, use_recipe

    if name is not None:
        data = use_recipe(name, force=force).data
        _say(f"params.yaml is now recipe {name}")
        _say(f"data: {data.name}, {data_needed(data.name, data.root)}")
        _say("next: `swap plan` shows what it will do, `dvc repro` does it")
        return
    recipes = list_recipes()
    chosen, equal = recipe_of_params(recipes)
    widest = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        mark = "*" if recipe.name == chosen else " "
        _say(f"{mark} {recipe.name:{widest}}  {recipe.summary}")
    now = "none of these" if chosen is None else f"{chosen}{'' if equal else ', edited'}"
    _say(f"params.yaml is {now}; `swap use NAME` writes a recipe there")


@main.command("params")
@click.argument("file", type=click.Path(path_type=Path), default=Path("params.yaml"))
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def list_params(file: Path, as_json: bool) -> None:
    """Print every param with its value, default and meaning.

    FILE is params.yaml, or any recipe. Params that are not in it have their defaults and may be added.
    """
    from swap_pipeline.cli.params_text import entries, text_of
    from swap_pipeline.config.reading import read_params

    found = entries(read_params(file))
    click.echo(json.dumps([asdict(entry) for entry in found], indent=2) if as_json else text_of(found))


@main.command()
@params_option
@click.option("--gpus", type=click.IntRange(min=1), help="Plan for this many GPUs instead of this machine's devices.")
@click.option(
    "--images-per-second",
    type=click.FloatRange(min=0, min_open=True, max=1e12),
    help="Training speed of one device at phase 1's first image size; if not given, measured here in a few seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all numbers as JSON.")
def plan(
    file: Path,
    gpus: int | None,
    images_per_second: float | None,
    as_json: bool,
) -> None:
    """Show what a params file will do: steps, samples, schedules, FLOPs, bytes and expected times.

    Trains nothing, and needs neither the data nor the GPUs. Reports what cannot work.
    """
    from swap_pipeline.config.reading import read_params

    params = read_params(file)
    from swap_pipeline.cli.plan.forecast import make_forecast
    from swap_pipeline.cli.plan.text import json_of, text_of

    forecast = make_forecast(params, file=file, num_gpus=gpus, images_per_second=images_per_second)
    _say(json_of(forecast) if as_json else text_of(forecast))


@main.command()
@click.option("--methods", metavar="A,B", help="Only these methods.")
@click.option("--seeds", metavar="0,1,2", help="Repeat each method with these seeds; by default that of params.yaml.")
@click.option("--jobs", type=click.IntRange(min=1), help="Maximum number of experiments at a time.")
@click.option("--dry-run", is_flag=True, help="Only print the commands.")
def compare(methods: str | None, seeds: str | None, jobs: int | None, dry_run: bool) -> None:
    """Run the recipe's methods as experiments, and print the paper's tables.

    Methods are changes to the recipe, in recipes/<recipe>.methods.yaml. Experiments are named <method>-<seed>. Those
    that are up to date are kept, shared stages are trained once, and free devices train other experiments.
    """
    from swap_pipeline.cli.compare.wanted import make_comparison

    chosen = _listed(methods)
    numbers = [_seed(text) for text in _listed(seeds) or ()]
    if dry_run:
        comparison = make_comparison(chosen, numbers)
        for note in comparison.notes:
            click.echo(f"note: {note}", err=True)
        for line in comparison.plain_commands():
            click.echo(line)
        return
    from swap_pipeline.cli.compare.running import only_one, run_experiments
    from swap_pipeline.launch.devices import this_machine

    with only_one():
        comparison = make_comparison(chosen, numbers)
        for note in comparison.notes:
            click.echo(f"note: {note}")
        current = len(comparison.wanted) - len(comparison.waiting)
        click.echo(f"{current} of {len(comparison.wanted)} experiments are up to date")
        try:
            failures = run_experiments(
                comparison.waiting, machine=this_machine(), most_at_once=jobs, say=lambda text: click.echo(text)
            )
        except KeyboardInterrupt:
            click.echo("interrupted; run `swap compare` again to resume")
            sys.exit(130)
    if len(failures) < len(comparison.wanted):
        _print_tables(everything=False, folder=TABLES)
    if failures:
        raise SwapError(f"{len(failures)} of {len(comparison.waiting)} experiments failed: {', '.join(failures)}")


@main.command()
@click.option("--all", "everything", is_flag=True, help="Include experiments that started from earlier commits.")
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path),
    default=TABLES,
    show_default=True,
    help="Folder for them.",
)
def tables(everything: bool, folder: Path) -> None:
    """Print the paper's Tables 1 to 4 from existing experiments of `swap compare`.

    Also writes them as Markdown, JSON and CSV, and as a page with figures, index.html.
    """
    _print_tables(everything=everything, folder=folder)


def _print_tables(*, everything: bool, folder: Path) -> None:
    from swap_pipeline.cli.compare.tables_text import markdown
    from swap_pipeline.cli.compare.tabulate import tables_of_experiments, write_tables

    found = tables_of_experiments(everything=everything)
    write_tables(found, folder)
    click.echo(f"\n{markdown(found, bold=False)}\ntables: {folder}/index.html, and .md, .json, .csv")


def _listed(text: str | None) -> list[str] | None:
    """Items between commas, without duplicates."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip())) if text else None


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise SwapError(f"--seeds has {text!r}: write whole numbers, such as 0,1,2")
    return int(text)


@main.command()
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="IMAGE...")
@click.option("--model", type=click.Path(path_type=Path), default=FINAL_MODEL, show_default=True, help="Checkpoint.")
@click.option("--top", type=click.IntRange(min=1), default=1, show_default=True, help="How many classes to print.")
@click.option(
    "--own", metavar="NAME", help="Your own network whose code may run; by default model.name of params.yaml."
)
def predict(images: tuple[Path, ...], model: Path, top: int, own: str | None) -> None:
    """Print the class of each IMAGE and its probability.

    Images are resized to the network's size, converted to its channels, and normalised like the training images. If
    the network is your own, the function that params.yaml names builds it.
    """
    from swap_pipeline.cli.models.predict import predict as predict_images

    for path, classes in predict_images(images, model, own=own or _own_network()):
        for name, probability in classes[:top]:
            _say(f"{path}\t{name}\t{100 * probability:.2f} %")


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), required=True, help="File for the mean.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Training images for batch norm: a folder of images, or data/prepared.",
)
@click.option("--model", metavar="NAME", help="The network, as in params.yaml, of files that do not say what they are.")
@click.option("--size", type=click.IntRange(1, 1 << 14), help="Side of its images; by default that of the library.")
@click.option("--batch-size", type=click.IntRange(min=2), default=500, show_default=True, help="Of the statistics.")
@click.option("--average-statistics", is_flag=True, help="Average batch-norm statistics too, instead of --data.")
def average(files: tuple[Path, ...], out: Path, **options: Any) -> None:
    """Write the mean of checkpoints of one network, of this pipeline or any safetensors, a piece at a time.

    The batch-norm statistics of a mean are not the mean of the statistics: --data names the training images to compute
    them from. A name package.module:function after --model runs that code.
    """
    from swap_pipeline.cli.models.average import Wish
    from swap_pipeline.cli.models.average import average as average_checkpoints

    _say(average_checkpoints(files, out, Wish(**options, own=_own_network())))


@main.command()
@click.argument("model", type=click.Path(path_type=Path), default=FINAL_MODEL)
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), default=Path("export"), show_default=True)
@click.option("--format", "kind", type=click.Choice(["all", "onnx", "pt2"]), default="all", show_default=True)
@click.option("--data", type=click.Path(path_type=Path), help="Prepared test images; data/prepared, if it is there.")
@click.option("--images", "num_images", type=click.IntRange(min=1), help="Compare on this many; by default on all.")
@click.option("--license", "licence", metavar="ID", help="For the model card, such as mit.")
@click.option("--own", metavar="NAME", help="Your own network whose code may run; by default that of params.yaml.")
def export(model: Path, folder: Path, kind: str, own: str | None, **options: Any) -> None:
    """Write MODEL as ONNX and as a program of torch.export (.pt2), with a model card, to a folder.

    Both take batches of any size of uint8 images and normalise them. They are compared with the network on test images.
    """
    from swap_pipeline.cli.models.export import ONNX, PROGRAM
    from swap_pipeline.cli.models.export import export as export_model

    names = {"all": (PROGRAM, ONNX), "onnx": (ONNX,), "pt2": (PROGRAM,)}[kind]
    for line in export_model(model, folder, names=names, own=own or _own_network(), **options).lines(folder):
        _say(line)


@main.command()
@params_option
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
@click.option("--gpu", is_flag=True, help="Try the GPUs too, for about a minute: values, precisions, speed.")
@click.option("--trial-on-cpu", is_flag=True, hidden=True)
def doctor(file: Path, as_json: bool, gpu: bool, trial_on_cpu: bool) -> None:
    """Check the machine and the project; exit code 1 if `dvc repro` would fail.

    Checks versions, devices, processes and threads, precision, data, disk, scratch, DVC and git, and changes nothing.
    `swap plan` uses the speed that --gpu measures.
    """
    from swap_pipeline.cli.doctor import examine, json_of, text_of

    findings = examine(file)
    if gpu or trial_on_cpu:
        from swap_pipeline.cli.doctor_gpu import examine_gpus

        findings += examine_gpus(file, on_cpu=trial_on_cpu)
    _say(json_of(findings) if as_json else text_of(findings))
    if any(finding.status == "problem" for finding in findings):
        sys.exit(1)


@main.command()
@params_option
def check(file: Path) -> None:
    """Check a params file within a second: its entries, and how DVC will use them.

    DVC reads params.yaml before any code of this project runs. This reports what would make DVC hang or mislead you.
    """
    from swap_pipeline.datasets.check import check as check_params

    params = check_params(file)
    _say(f"{file} is fine: recipe {shown(params.recipe)}, {len(params.workers.seeds)} workers")


@main.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("--all", "everything", is_flag=True, help="Also remove what the current params need, and downloads.")
def clean(yes: bool, dry_run: bool, everything: bool) -> None:
    """Remove scratch (.swap) that no run of the current params needs, after listing it.

    Never touches running jobs, checkpoints, metrics or DVC's cache.
    """
    from swap_pipeline.cli.amounts import in_bytes
    from swap_pipeline.cli.clean import look, remove

    entries = look(everything=everything)
    stale = [entry for entry in entries if not entry.is_needed and not entry.is_running]
    for entry in entries:
        mark = "remove" if entry in stale else "keep  "
        _say(f"{mark}  {entry}")
    freed = in_bytes(sum(entry.num_bytes for entry in stale))
    if not stale:
        _say("nothing to remove")
    elif dry_run:
        _say(f"would remove {len(stale)} of {len(entries)} folders and free {freed}")
    elif yes or click.confirm(f"remove {len(stale)} of {len(entries)} folders and free {freed}?"):
        removed = remove(stale)
        _say(f"removed {len(removed)} folders, {in_bytes(sum(entry.num_bytes for entry in removed))} are free")


def _own_network() -> str | None:
    """The network's name in this project's params, whose code the user has chosen to run."""
    from swap_pipeline.config.reading import read_params

    try:
        return read_params().model.name
    except SwapError:
        return None
