"""python -m swap_pipeline.cli: the command `swap`, even if it is not installed."""

from __future__ import annotations

from swap_pipeline.cli.main import main

if __name__ == "__main__":
    main(prog_name="swap")
