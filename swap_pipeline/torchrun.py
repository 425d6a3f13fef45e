"""python -m swap_pipeline.torchrun --standalone --nproc-per-node 2 -m stages.phase1

torchrun, in a process that does not outlive the launcher.
"""

from __future__ import annotations

import os

from swap_pipeline.ranks import PARENT, die_with_parent


def main() -> None:
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())  # the one that the ranks are to die with
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
