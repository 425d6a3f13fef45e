"""python -m swap_pipeline.launch.torchrun --standalone --nproc-per-node 2 -m stages.phase1

torchrun in a process that dies with the launcher. As one of several tasks of a Slurm step, it takes the step's first
host as rendezvous.
"""

from __future__ import annotations

import os
import subprocess
import sys

from swap_pipeline.runtime.rank import PARENT, die_with_parent, quick_imports

PORT = "SWAP_RENDEZVOUS_PORT"


def main() -> None:
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())  # the ranks die with this process
    if PORT in os.environ:
        sys.argv[1:1] = ["--rdzv-endpoint", f"{_first_host_of_step()}:{os.environ[PORT]}"]
        if "SLURMD_NODENAME" in os.environ:
            # torchrun would advertise the fully qualified name, which other nodes may not resolve.
            sys.argv[1:1] = ["--local-addr", os.environ["SLURMD_NODENAME"]]
    with quick_imports():
        from torch.distributed.run import main as torchrun

    torchrun()


def _first_host_of_step() -> str:
    nodes = os.environ["SLURM_STEP_NODELIST"]
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()[0]


if __name__ == "__main__":
    main()
