"""The pipeline's stages, one module each: `python -m stages.<name>` from the project's root."""

import importlib.util
import signal
import sys

if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the imports ends the stage without a traceback; `run_stage` handles it from then on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# DVC starts a stage with the first `python` on PATH, which may lack the project's packages.
for _top in ("click", "ruamel", "torch"):
    if importlib.util.find_spec(_top) is None:
        sys.exit(
            f"error: {sys.executable} has no package {_top!r}: activate the project's environment "
            f"(`source .venv/bin/activate`), or `make run`, which does that for you"
        )
