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
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="IMAGE...")
@click.option("--model", type=click.Path(path_type=Path), default=FINAL_MODEL, show_default=True, help="Checkpoint.")
@click.option("--top", type=click.IntRange(min=1), default=1, show_default=True, help="How many classes to print.")
def predict(images: tuple[Path, ...], model: Path, top: int) -> None:
    """Print the class of each IMAGE and its probability.

    An image is brought to the network's size and number of channels, and normalised as the training images were.
    """
    from swap_pipeline.predict import predict as predict_images

    for path, classes in predict_images(images, model):
        for name, probability in classes[:top]:
            click.echo(f"{path}\t{name}\t{100 * probability:.2f} %")


if __name__ == "__main__":
    main(prog_name="swap")
