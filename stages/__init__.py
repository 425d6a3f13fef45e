"""The pipeline's stages, one module each: `python -m stages.<name>` from the project's root."""

import importlib.util
import sys

# DVC starts a stage with the first `python` on PATH, which may lack the project's packages.
for _top in ("click", "ruamel", "torch"):
    if importlib.util.find_spec(_top) is None:
        sys.exit(
            f"error: {sys.executable} has no package {_top!r}: activate the project's environment "
            f"(`source .venv/bin/activate`), or `make run`, which does that for you"
        )
