"""The paper's results: Tables 1 to 4 of Gupta, Akle Serrano and DeCoste, ICLR 2020."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure as the paper prints it: `95.24 ± 0.09`, or a plain number."""

    text: str
    unit: str

    @property
    def mean(self) -> float:
        return float(self.text.partition(" ± ")[0])

    @property
    def std(self) -> float | None:
        spread = self.text.partition(" ± ")[2]
        return float(spread) if spread else None


Figures = Mapping[str, Figure]
"""By quantity."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """The paper's results for one of our tables."""

    source: str = ""
    rows: Mapping[str, Figures] = field(default_factory=dict)
    """by method"""


def _plain(accuracy: str, time: str | None, gpus: int, *, top5: str | None = None, unit: str = "s") -> Figures:
    figures = {
        "test_accuracy": Figure(text=accuracy, unit="%"),
        "devices": Figure(text=str(gpus), unit="devices"),
    }
    if top5 is not None:
        figures["test_top5"] = Figure(text=top5, unit="%")
    if time is not None:
        figures["training_time"] = Figure(text=time, unit=unit)
    return figures


def _averaged(before: str, after: str, time: str) -> Figures:
    return {
        "before_averaging": Figure(text=before, unit="%"),
        "after_averaging": Figure(text=after, unit="%"),
        "training_time": Figure(text=time, unit="s"),
    }


_TABLE_1 = {
    "small_batch": _plain("95.24 ± 0.09", "254.12 ± 0.62", 2),
    "large_batch": _plain("94.77 ± 0.23", "132.62 ± 1.09", 8),
    "swap_before": _plain("94.70 ± 0.20", "167.57 ± 3.25", 8),
    "swap_after": _plain("95.23 ± 0.08", "169.20 ± 3.25", 8),
}
_TABLE_2 = {
    "small_batch": _plain("77.01 ± 0.25", "573.76 ± 2.25", 1),
    "large_batch": _plain("75.84 ± 0.35", "116.13 ± 1.35", 8),
    "swap_before": _plain("75.74 ± 0.15", "123.11 ± 1.85", 8),
    "swap_after": _plain("78.18 ± 0.21", "125.34 ± 1.85", 8),
}
_TABLE_3 = {
    "small_batch": _plain("76.14 ± 0.07", "235.29 ± 0.33", 8, top5="93.30 ± 0.07", unit="min"),
    "large_batch": _plain("75.86 ± 0.03", "127.20 ± 0.78", 16, top5="92.98 ± 0.06", unit="min"),
    "swap_before": _plain("75.96 ± 0.02", "149.12 ± 0.55", 16, top5="93.15 ± 0.02", unit="min"),
    "swap_after": _plain("76.19 ± 0.03", "156.55 ± 0.56", 16, top5="93.32 ± 0.02", unit="min"),
}
_TABLE_4_SWA = {
    "swa_large_batch": _averaged("76.06 ± 0.25", "76.00 ± 0.31", "376.4 ± 2.25"),
    "swa_large_then_small": _averaged("76.26 ± 0.35", "78.12 ± 0.14", "398.0 ± 1.35"),
    "swa_small_batch": _averaged("76.80 ± 0.15", "79.09 ± 0.19", "848.6 ± 5.61"),
}
_TABLE_4_SWAP_10 = _averaged("75.74 ± 0.15", "78.18 ± 0.21", "125.30 ± 1.85")
_TABLE_4_SWAP_40 = _averaged("76.19 ± 0.19", "79.11 ± 0.12", "241.54 ± 1.62")

PLAIN_IN_PAPER = {
    "cifar10": Paper(source="Table 1: 10 runs on Tesla V100 GPUs", rows=_TABLE_1),
    "cifar10-cpu": Paper(
        source="Table 1: 10 runs on Tesla V100 GPUs. Its network is four times as wide as this recipe's and saw all "
        "50,000 images: compare the order of the methods, not the values",
        rows=_TABLE_1,
    ),
    "cifar100": Paper(source="Table 2: 10 runs on Tesla V100 GPUs", rows=_TABLE_2),
    "imagenet": Paper(source="Table 3: 3 runs on Tesla V100 GPUs, times in minutes", rows=_TABLE_3),
}
SWA_IN_PAPER = {
    "cifar100": Paper(
        source="Table 4: 8 models and 10 epochs for each, in the last row 16 and 20, on Tesla V100 GPUs",
        rows={**_TABLE_4_SWA, "swap": _TABLE_4_SWAP_10, "swap_40": _TABLE_4_SWAP_40},
    ),
}
