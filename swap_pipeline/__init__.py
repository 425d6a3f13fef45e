"""SWAP, Stochastic Weight Averaging in Parallel (Gupta, Akle Serrano, DeCoste, ICLR 2020), as a DVC pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swap_pipeline.models.networks import load_model as load_model

__all__ = ["__version__", "load_model"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported on first use: importing torch takes seconds, and neither the launcher nor `swap --help` needs it.
    if name == "load_model":
        from swap_pipeline.models.networks import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
