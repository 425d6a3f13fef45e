"""The `swap` command."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from swap_pipeline.errors import SwapError

FINAL_MODEL = Path("checkpoints/phase3/model.safetensors")


class _Commands(click.Group):
    """Errors that the user can mend come as one line."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except SwapError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="swap-pipeline")
def main() -> None:
    """SWAP: train with large batches, refine in parallel with small ones, average.

    The pipeline itself is run by DVC: `dvc repro`. These commands work beside it.
    """


@main.command()
@click.argument("name", required=False)
@click.option("--force", is_flag=True, help="Overwrite edits of params.yaml that are not committed.")
def use(name: str | None, force: bool) -> None:
    """Write the recipe NAME to params.yaml; without NAME, list the recipes.

    A recipe is a complete params file: an experiment of the paper, or one made smaller. params.yaml is not overwritten
    if that would lose edits.
    """
    from swap_pipeline.recipes import data_needed, list_recipes, origin_of_params, use_recipe

    if name is not None:
        data = use_recipe(name, force=force).data
        click.echo(f"params.yaml is now recipe {name}")
        click.echo(f"data: {data.name}, {data_needed(data.name, data.root)}")
        click.echo("next: `swap plan` shows what it will do, `dvc repro` does it")
        return
    recipes = list_recipes()
    origin = origin_of_params(recipes)
    widest = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        mark = "*" if origin is not None and recipe.name == origin.recipe else " "
        click.echo(f"{mark} {recipe.name:{widest}}  {recipe.summary}")
    now = "none of these" if origin is None else f"{origin.recipe}{', edited' if origin.edited else ''}"
    click.echo(f"params.yaml is {now}; `swap use NAME` writes a recipe there")


@main.command()
@click.option(
    "--params",
    "file",
    type=click.Path(path_type=Path),
    default=Path("params.yaml"),
    show_default=True,
    help="What to plan; any recipe will do.",
)
@click.option("--gpus", type=click.IntRange(min=1), help="Plan for so many GPUs instead of what this machine has.")
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    help="Those GPUs are spread over so many nodes: print the commands for each of them, for use with ssh alone.",
)
@click.option(
    "--images-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="How fast one device trains, at phase 1's first image size; measured here in a few seconds if not given.",
)
@click.option(
    "--link",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB/S",
    help="Bandwidth between GPUs: also show what the exchange of gradients and the files take, as in docs/scaling.md.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the schedules into this .svg or .png file.")
@click.option("--json", "as_json", is_flag=True, help="Print all numbers as JSON.")
def plan(
    file: Path,
    gpus: int | None,
    nodes: int | None,
    images_per_second: float | None,
    link: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Show what a params file will do: steps, samples, schedules, FLOPs, bytes and expected times.

    Nothing is trained, and neither the data nor the GPUs have to be there. What cannot work is refused.
    """
    from swap_pipeline.params import read_params
    from swap_pipeline.plan_plot import check_format, draw

    if plot is not None:
        check_format(plot)
    params = read_params(file)
    from swap_pipeline.plan_text import json_of, text_of
    from swap_pipeline.planning import make_forecast

    forecast = make_forecast(
        params,
        file=file,
        num_gpus=gpus,
        num_nodes=nodes,
        images_per_second=images_per_second,
        link_gigabytes=link,
    )
    if plot is not None:
        draw(forecast.plan, plot, title=forecast.title)
        click.echo(f"drawn: {plot}", err=True)
    click.echo(json_of(forecast) if as_json else text_of(forecast))


@main.command()
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="IMAGE...")
@click.option("--model", type=click.Path(path_type=Path), default=FINAL_MODEL, show_default=True, help="Checkpoint.")
@click.option("--top", type=click.IntRange(min=1), default=1, show_default=True, help="How many classes to print.")
@click.option(
    "--own", metavar="NAME", help="Your own network whose code may run; by default model.name of params.yaml."
)
def predict(images: tuple[Path, ...], model: Path, top: int, own: str | None) -> None:
    """Print the class of each IMAGE and its probability.

    An image is brought to the network's size and number of channels, and normalised as the training images were. A
    network of your own is built by the function that params.yaml names.
    """
    from swap_pipeline.predict import predict as predict_images

    for path, classes in predict_images(images, model, own=own or _own_network()):
        for name, probability in classes[:top]:
            click.echo(f"{path}\t{name}\t{100 * probability:.2f} %")


@main.command()
@click.option(
    "--params",
    "file",
    type=click.Path(path_type=Path),
    default=Path("params.yaml"),
    show_default=True,
    help="What is to be run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
def doctor(file: Path, as_json: bool) -> None:
    """Look at what a person would check first; exit code 1 if `dvc repro` would not get through.

    Versions, devices, processes and threads, precision, data, disk, scratch, DVC and git. Nothing is changed.
    """
    from swap_pipeline.doctor import examine, json_of, text_of

    findings = examine(file)
    click.echo(json_of(findings) if as_json else text_of(findings))
    if any(finding.status == "problem" for finding in findings):
        sys.exit(1)


@main.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--all", "everything", is_flag=True, help="Also what the present params need, and downloads.")
def clean(yes: bool, dry_run: bool, everything: bool) -> None:
    """Remove scratch (.swap) that no run of the present params needs, after saying how much that is.

    Jobs at work are never touched, nor are checkpoints, metrics and DVC's cache.
    """
    from swap_pipeline.clean import in_bytes, look, remove

    entries = look(everything=everything)
    stale = [entry for entry in entries if not entry.is_needed and not entry.is_running]
    for entry in entries:
        mark = "remove" if entry in stale else "keep  "
        click.echo(f"{mark}  {entry}")
    freed = in_bytes(sum(entry.num_bytes for entry in stale))
    if not stale:
        click.echo("nothing to remove")
    elif dry_run:
        click.echo(f"would remove {len(stale)} of {len(entries)} folders and free {freed}")
    elif yes or click.confirm(f"remove {len(stale)} of {len(entries)} folders and free {freed}?"):
        removed = remove(stale)
        click.echo(f"removed {len(removed)} folders, {in_bytes(sum(entry.num_bytes for entry in removed))} are free")


def _own_network() -> str | None:
    """What this project's params call its network: code that its user chose, whatever a checkpoint says."""
    from swap_pipeline.params import read_params

    try:
        return read_params().model.name
    except SwapError:
        return None


if __name__ == "__main__":
    main(prog_name="swap")
