"""Names of the models that a run keeps besides its last one, and the epochs after which it keeps them."""

from __future__ import annotations

from swap_pipeline.config.params import EpochList

LAST_MODEL = "model.safetensors"
"""of every run, in its checkpoints folder"""


def label_of_epoch(epoch: int) -> str:
    return f"epoch_{epoch}"


def epoch_of_label(label: str) -> int:
    return int(label.removeprefix("epoch_"))


def _of_epoch(epoch: int) -> str:
    return f"{label_of_epoch(epoch)}.safetensors"


def _of_cycle(cycle: int) -> str:
    return f"cycle_{cycle}.safetensors"


def models_of_cycles(*, epochs: int, cycles: int) -> dict[int, str]:
    """Models to keep, by epoch: those at the ends of cycles. The last cycle's is the result itself."""
    return {epochs // cycles * k: _of_cycle(k) for k in range(1, cycles)}


def models_to_keep(wanted: EpochList, *, epochs: int) -> dict[int, str]:
    """Models of a run to keep besides its last one, by epoch, for the analysis."""
    return {epoch: _of_epoch(epoch) for epoch in range(1, epochs) if wanted == "all" or epoch in wanted}


def models_if_ended(epoch: int, *, epochs: int, cycles: int) -> list[str]:
    """The models of a run that are averaged if it ends after `epoch`: those of its past cycles, then its last."""
    cycle = epochs // cycles
    ended = [_of_cycle(k) for k in range(1, (epoch - 1) // cycle + 1)] if cycle else []
    if epoch == epochs:
        return [*ended, LAST_MODEL]
    return [*ended, _of_cycle(epoch // cycle) if epoch % cycle == 0 else _of_epoch(epoch)]
