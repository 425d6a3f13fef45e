"""`swap use`: the params files in `recipes/`; which of them `params.yaml` is, and writing one there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.errors import SwapError, did_you_mean
from swap_pipeline.report.git import git, refusal
from swap_pipeline.storage.files import atomic_write, read_plain

RECIPES = Path("recipes")
PARAMS = Path("params.yaml")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete params file; its first line is a comment that describes it."""

    name: str
    path: Path
    content: bytes

    @property
    def summary(self) -> str:
        first = self.content.decode(errors="replace").split("\n", 1)[0]
        shown = "".join(letter for letter in first if letter.isprintable())
        return shown.lstrip("#").strip() if shown.startswith("#") else ""


def list_recipes() -> list[Recipe]:
    """All recipes, by name."""
    paths = sorted(set(RECIPES.glob("*.yaml")) - set(RECIPES.glob("*.methods.yaml")), key=lambda path: path.stem)
    if not paths:
        raise SwapError(f"there is no {RECIPES}/ with recipes here: run this from the project's root folder")
    return [Recipe(name=path.stem, path=path, content=_read(path)) for path in paths]


def methods_file(recipe: str) -> Path:
    """The methods that `swap compare` runs, as changes to the recipe."""
    return RECIPES / f"{recipe}.methods.yaml"


def _read(path: Path) -> bytes:
    if not path.resolve().is_relative_to(Path.cwd().resolve()):
        raise SwapError(f"{path} is a link to {path.resolve()}, outside of this project: replace it with a copy")
    try:
        return read_plain(path)
    except OSError as error:
        raise SwapError(f"{path} cannot be read ({error.strerror or error}): repair or remove it") from None


def recipe_of_params(recipes: list[Recipe]) -> tuple[str | None, bool]:
    """The recipe that `params.yaml` came from, and whether it still equals it; None if from none of these."""
    content = _read_params_file()
    for recipe in recipes:
        if recipe.content == content:
            return recipe.name, True
    said = _recipe_entry(content or b"")
    return said if said in {recipe.name for recipe in recipes} else None, False


def use_recipe(name: str, *, force: bool) -> Params:
    """Write a recipe to `params.yaml`, atomically; edits that exist nowhere else are not overwritten."""
    recipes = list_recipes()
    chosen = next((recipe for recipe in recipes if recipe.name == name), None)
    if chosen is None:
        bare = Path(name).name.removesuffix(".yaml")  # for a path from shell completion
        raise SwapError(f"there is no recipe {name!r}{did_you_mean(bare, [recipe.name for recipe in recipes])}")
    params = read_params(chosen.path)  # names the file, if it is not valid
    current = _read_params_file()
    unique = current is not None and all(recipe.content != current for recipe in recipes)
    if unique and not force and (why := refusal()):
        raise SwapError(f"{PARAMS} may have edits that are not committed: {why}, or overwrite it with --force")
    if unique and not force and not _is_committed(PARAMS):
        raise SwapError(f"{PARAMS} has uncommitted edits: commit it first, or overwrite it with --force")
    with atomic_write(PARAMS) as file:
        file.write(chosen.content)
    return params


def data_needed(name: str, root: str) -> str:
    """What the user has to do about the data before the first run."""
    if name == "fashion-mini":
        return "in this repository"
    if name in ("imagefolder", "imagenet"):
        missing = "" if (Path(root) / "train").is_dir() else "; not there yet"
        return f"your images, as {root}/train/<class>/… and {root}/test/<class>/… (or val/){missing}"
    return f"downloaded on the first run unless its official files are in {root}"


def _read_params_file() -> bytes | None:
    try:
        return read_plain(PARAMS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SwapError(f"{PARAMS} cannot be read ({error.strerror or error}): remove it") from None


def _recipe_entry(content: bytes) -> str | None:
    """The entry `recipe`, even if the file has mistakes elsewhere."""
    for line in content.decode(errors="replace").splitlines():
        key, colon, value = line.partition(":")
        if key == "recipe" and colon:
            return value.split("#")[0].strip().strip("'\"")
    return None


def _is_committed(path: Path) -> bool:
    """Whether git's last commit has exactly this file; False without git or a repository."""
    committed = git("rev-parse", "--verify", "--quiet", f"HEAD:./{path}")
    # hash-object converts line endings as a commit would.
    return committed is not None and committed == git("hash-object", "--", str(path))
