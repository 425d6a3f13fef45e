"""torchrun, in a process that does not outlive the launcher.

python -m swap_pipeline.torchrun --standalone --nproc-per-node 2 -m stages.phase1
"""

from __future__ import annotations

from swap_pipeline.launch import die_with_parent, parent_of_ranks


def main() -> None:
    die_with_parent()
    parent_of_ranks()
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
