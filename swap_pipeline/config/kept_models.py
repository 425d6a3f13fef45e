"""What the models are called that a run keeps beside its last one, and after which epochs there is one."""

from __future__ import annotations

from swap_pipeline.config.params import EpochList

LAST_MODEL = "model.safetensors"
"""of every run, in the folder of its models"""


def label_of_epoch(epoch: int) -> str:
    return f"epoch_{epoch}"


def epoch_of_label(label: str) -> int:
    return int(label.removeprefix("epoch_"))


def _of_epoch(epoch: int) -> str:
    return f"{label_of_epoch(epoch)}.safetensors"


def _of_cycle(cycle: int) -> str:
    return f"cycle_{cycle}.safetensors"


def models_of_cycles(*, epochs: int, cycles: int) -> dict[int, str]:
    """Which models to keep, by epoch: those at the ends of cycles. The last cycle's is the result itself."""
    return {epochs // cycles * k: _of_cycle(k) for k in range(1, cycles)}


def models_to_keep(wanted: EpochList, *, epochs: int) -> dict[int, str]:
    """Which models of a run to keep beside its last one, by epoch, for the analysis of its course."""
    return {epoch: _of_epoch(epoch) for epoch in range(1, epochs) if wanted == "all" or epoch in wanted}


def models_if_ended(epoch: int, *, epochs: int, cycles: int) -> list[str]:
    """What of a run is averaged if it ends after `epoch`: its model, and before it those of its past cycles."""
    cycle = epochs // cycles
    ended = [_of_cycle(k) for k in range(1, (epoch - 1) // cycle + 1)] if cycle else []
    if epoch == epochs:
        return [*ended, LAST_MODEL]
    return [*ended, _of_cycle(epoch // cycle) if epoch % cycle == 0 else _of_epoch(epoch)]
