"""`params.yaml`, read and checked, including the rules that involve several entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swap_pipeline.config.params import Knots, Params, Phase2, Schedule
from swap_pipeline.config.parsing import parse_as, read_tree
from swap_pipeline.errors import SwapError


def read_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check a params file; a `SwapError` describes the first bad entry."""
    return parse_params(read_tree(path), file=str(path))


def parse_params(tree: Any, *, file: str = "params.yaml") -> Params:
    """Check a nested dict, as read from `file`, and convert it to `Params`."""
    params = parse_as(Params, tree, file=file)
    try:
        _check_together(params)
    except SwapError as error:
        raise SwapError(f"{file}: {error}") from None
    return params


def _check_together(params: Params) -> None:
    """Rules that involve more than one entry."""
    _check_schedule("phase1", params.phase1, epochs=params.phase1.max_epochs, length="max_epochs")
    _check_schedule("phase2", params.phase2, epochs=params.phase2.epochs, cycles=params.phase2.cycles)
    if params.model.pretrained and params.model.zero_init_last_gamma:
        raise SwapError(
            "model.zero_init_last_gamma has no effect on published weights (model.pretrained): set it to false"
        )
    if params.phase1.start is not None and (params.model.pretrained or params.model.zero_init_last_gamma):
        entry = "pretrained" if params.model.pretrained else "zero_init_last_gamma"
        raise SwapError(f"model.{entry} has no effect with phase1.start: set it to false, or remove phase1.start")
    if 0 < params.phase1.stop_accuracy <= 1:
        meant = 100 * params.phase1.stop_accuracy
        raise SwapError(f"phase1.stop_accuracy is {params.phase1.stop_accuracy:g}, but is in percent: write {meant:g}")
    _check_exit(params)
    if params.optimizer.nesterov and params.optimizer.momentum == 0:
        raise SwapError("optimizer.nesterov is true but optimizer.momentum is 0: set a momentum or nesterov: false")
    if params.phase3.select == "greedy" and not params.data.validation_images:
        raise SwapError(
            "phase3.select is greedy, which chooses by validation images, but data.validation_images is 0: raise it, "
            "or set phase3.select: all"
        )
    if not params.workers.seeds:
        raise SwapError("workers.seeds is empty: list at least one seed, for example [0, 1, 2, 3]")
    twice = sorted({seed for seed in params.workers.seeds if params.workers.seeds.count(seed) > 1})
    if twice:
        raise SwapError(
            f"workers.seeds lists {', '.join(map(str, twice))} more than once: "
            f"equal seeds give equal models, so list each one once"
        )


def _check_exit(params: Params) -> None:
    phase1, phase2 = params.phase1, params.phase2
    if phase1.stop in ("plateau", "fork") and params.data.validation_images == 0:
        raise SwapError(f"phase1.stop is {phase1.stop}, which needs a validation set: set data.validation_images")
    if phase1.stop == "qsr":
        if phase1.qsr_alpha is None:
            raise SwapError("phase1.stop is qsr, but phase1.qsr_alpha is missing: add it (docs/choosing-tau.md)")
        if phase1.qsr_steps is None:
            raise SwapError(
                "phase1.stop is qsr, but phase1.qsr_steps is missing: add phase 2's number of steps, "
                f"{phase2.epochs} × the batches of an epoch"
            )
    if phase1.stop == "fork":
        of_phase2 = {"fork_batch_size": phase2.batch_size, "fork_lr": phase2.peak_lr}
        for key, value in of_phase2.items():
            if getattr(phase1, key) is None:
                example = f", {value}" if isinstance(value, int | float) else ""
                raise SwapError(f"phase1.stop is fork, but phase1.{key} is missing: set it to phase 2's{example}")


_BY_EPOCH = ("lr_knots", "batch_size", "image_size", "min_scale")


def _check_schedule(name: str, given: Schedule, *, epochs: int, length: str = "epochs", cycles: int = 1) -> None:
    if given.lr_knots is None:
        if given.peak_lr is None:
            raise SwapError(f"{name}.peak_lr is missing: add it, or set the whole schedule as {name}.lr_knots")
    else:
        idle = [f"{name}.{entry}" for entry in ("peak_lr", "warmup_epochs") if getattr(given, entry) is not None]
        idle += [f"{name}.schedule"] if given.schedule != "linear" else []
        if idle:
            have = "has" if len(idle) == 1 else "have"
            raise SwapError(f"{' and '.join(idle)} {have} no effect with {name}.lr_knots: remove one or the other")
    sizes = [given.batch_size] if isinstance(given.batch_size, int) else [size for _, size in given.batch_size]
    for size in sizes:
        if size % given.shards:
            best = max(n for n in range(1, given.shards + 1) if all(size % n == 0 for size in sizes))
            raise SwapError(
                f"{name}.batch_size is {size}, which {given.shards} shards cannot share equally: "
                f"choose a multiple of {given.shards}, or set {name}.shards to {best}"
            )
    if epochs == 0:
        if cycles > 1:
            raise SwapError(f"{name}.cycles is {cycles}, but {name}.epochs is 0: set cycles to 1")
        return
    if epochs % cycles:
        raise SwapError(f"{name}.cycles is {cycles}, which does not divide {name}.{length} ({epochs}) into equal parts")
    if given.warmup_epochs is not None and given.warmup_epochs > epochs / cycles:
        of = f"{name}.{length} ({epochs})" if cycles == 1 else f"a cycle ({epochs // cycles} epochs)"
        raise SwapError(
            f"{name}.warmup_epochs is {given.warmup_epochs:g}, longer than {of}: lower one or raise the other"
        )
    if given.min_scale is not None and given.image_size is None:
        raise SwapError(f"{name}.min_scale has no effect without {name}.image_size: add that, or remove min_scale")
    by_epoch = [entry for entry in _BY_EPOCH if isinstance(getattr(given, entry), tuple)]
    first = given.first_epoch if isinstance(given, Phase2) else 0
    if first and not by_epoch:
        raise SwapError(f"{name}.first_epoch has no effect if nothing is given by epoch: remove it")
    for entry in by_epoch:
        _check_knots(f"{name}.{entry}", getattr(given, entry), jumps=entry == "lr_knots")
    if given.lr_knots is not None and given.lr_knots[-1][0] < first + epochs:
        raise SwapError(
            f"{name}.lr_knots ends at epoch {given.lr_knots[-1][0]:g}, the run at {first + epochs}: add a knot there"
        )


def _check_knots(key: str, knots: Knots, *, jumps: bool) -> None:
    if not knots:
        raise SwapError(f"{key} is empty: write it as [[epoch, value], …]")
    epochs = [epoch for epoch, _ in knots]
    if epochs[0] != 0:
        raise SwapError(f"{key} begins at epoch {epochs[0]:g}: begin at 0")
    if epochs != sorted(epochs) or (not jumps and len(set(epochs)) < len(epochs)):
        raise SwapError(f"{key} has epochs {', '.join(f'{epoch:g}' for epoch in epochs)}: list them in rising order")
