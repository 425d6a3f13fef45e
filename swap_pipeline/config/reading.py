"""`params.yaml`, read and checked, including the rules that involve several entries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from swap_pipeline.config.copies import copy_for
from swap_pipeline.config.params import Knots, Optimizer, Params, Phase2, Schedule
from swap_pipeline.config.parsing import parse_as, read_tree
from swap_pipeline.config.schedules import by_epoch, end_of_warmup, learning_rate_of, num_fork_tests
from swap_pipeline.errors import SwapError, did_you_mean, shown


def read_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check a params file; a `SwapError` describes the first bad entry."""
    return parse_params(read_tree(path), file=str(path))


def parse_params(tree: Any, *, file: str = "params.yaml") -> Params:
    """Check a nested dict, as read from `file`, and convert it to `Params`."""
    params = parse_as(Params, tree, file=file)
    try:
        params = _with_optimizers(params, tree)
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
    _check_sync(params)
    _check_exit(params)
    _check_copies(params)
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


_ONLY_SGD = ("momentum", "nesterov")


def _with_optimizers(params: Params, tree: Mapping[str, Any]) -> Params:
    """The params with a whole optimizer in each phase whose section changes it."""
    _check_optimizer("optimizer", params.optimizer, tree.get("optimizer", {}))

    def whole(name: str, phase: Schedule) -> Optimizer | None:
        if phase.optimizer is None:
            return None
        given = tree[name]["optimizer"]
        has_own_name = "name" in given and phase.optimizer.name != params.optimizer.name
        taken = vars(params.optimizer).keys() - given.keys() - {*((*_ONLY_SGD, "options") if has_own_name else ())}
        optimizer = replace(phase.optimizer, **{entry: getattr(params.optimizer, entry) for entry in taken})
        _check_optimizer(f"{name}.optimizer", optimizer, given)
        optimizer = replace(optimizer, options=optimizer.options or None)
        return None if optimizer == params.optimizer else optimizer

    phase1, phase2 = whole("phase1", params.phase1), whole("phase2", params.phase2)
    return replace(
        params,
        phase1=replace(params.phase1, optimizer=phase1),
        phase2=replace(params.phase2, optimizer=phase2),
    )


def _check_optimizer(key: str, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """`given` are the entries of its own section."""
    name = optimizer.name
    library, _, short = name.partition(":")
    if name != "sgd" and (library not in ("torch", "timm") or not short):
        ways = {"sgd": "sgd", "torch": "torch:<class>", "timm": "timm:<name>"}
        otherwise = f": choose one of {', '.join(ways.values())}"
        raise SwapError(f"{key}.name is {shown(name)}{did_you_mean(library, ways, otherwise=otherwise)}")
    if name == "sgd":
        if optimizer.options:
            raise SwapError(f"{key}.options is set, but sgd has none: remove it, or set {key}.name")
        if optimizer.nesterov and optimizer.momentum == 0:
            raise SwapError(f"{key}.nesterov is true but {key}.momentum is 0: set a momentum or nesterov: false")
        return
    for entry in _ONLY_SGD:
        if entry in given:
            raise SwapError(
                f"{key}.{entry} is for sgd and has no effect on {name}: remove it; {name} takes all but weight decay "
                f"from {key}.options"
            )


def _check_sync(params: Params) -> None:
    given = params.phase1.sync_steps
    if isinstance(given, tuple):
        _check_knots("phase1.sync_steps", given, jumps=False)
    most = given if isinstance(given, int) else max(steps for _, steps in given)
    if most > 1 and params.phase1.shards == 1:
        raise SwapError(
            f"phase1.sync_steps is {most}, but phase1.shards is 1, which has no other shard to average with: raise "
            f"phase1.shards, or remove sync_steps"
        )
    if most > 1 and (name := params.optimizers[0].name) != "sgd":
        raise SwapError(
            f"phase1.sync_steps is {most}, which averages the momentum of sgd, but phase 1's optimizer is {name}: "
            f"remove sync_steps, or take sgd"
        )


def _check_exit(params: Params) -> None:
    phase1, phase2 = params.phase1, params.phase2
    if phase1.stop in ("plateau", "fork") and params.data.validation_images == 0:
        raise SwapError(f"phase1.stop is {phase1.stop}, which needs a validation set: set data.validation_images")
    if phase1.stop == "plateau" and phase1.patience >= phase1.max_epochs:
        raise SwapError(
            f"phase1.stop is plateau, but phase1.patience is {phase1.patience} and phase1.max_epochs "
            f"{phase1.max_epochs}, so it never ends the phase: lower phase1.patience"
        )
    if phase1.stop == "qsr":
        if phase1.qsr_alpha is None:
            raise SwapError("phase1.stop is qsr, but phase1.qsr_alpha is missing: add it (docs/choosing-tau.md)")
        if phase1.qsr_steps is None:
            raise SwapError(
                "phase1.stop is qsr, but phase1.qsr_steps is missing: add phase 2's number of steps, "
                f"{phase2.epochs} × the batches of an epoch"
            )
        rate, most = learning_rate_of(phase1, epochs=phase1.max_epochs), phase1.qsr_alpha / math.sqrt(phase1.qsr_steps)
        after = range(end_of_warmup(rate, epochs=phase1.max_epochs) + 1, phase1.max_epochs + 1)
        if all(rate(epoch) > most for epoch in after):
            raise SwapError(
                f"phase1.stop is qsr, but phase 1's learning rate never falls to qsr_alpha / √qsr_steps = {most:.3g}: "
                "raise phase1.qsr_alpha, or let the rate fall"
            )
    if phase1.stop == "fork":
        if params.optimizers[0] != params.optimizers[1]:
            raise SwapError(
                "phase1.stop is fork, whose trials of phase 2 use phase 1's optimizer, but phase 2 has another one: "
                "choose another rule, or the same optimizer for both"
            )
        of_phase2 = {"fork_batch_size": phase2.batch_size, "fork_lr": phase2.peak_lr}
        for key, value in of_phase2.items():
            if getattr(phase1, key) is None:
                example = f", {value}" if isinstance(value, int | float) else ""
                raise SwapError(f"phase1.stop is fork, but phase1.{key} is missing: set it to phase 2's{example}")
        if (tests := num_fork_tests(phase1)) < 2:
            raise SwapError(
                f"phase1.stop is fork, which compares two tests, but there is time for {tests} between the warm-up and "
                f"phase1.max_epochs ({phase1.max_epochs}): lower phase1.fork_every ({phase1.fork_every})"
            )


def _check_copies(params: Params) -> None:
    copies = params.data.copies
    if not copies:
        return
    if list(copies) != sorted(set(copies)):
        raise SwapError(f"data.copies is {list(copies)}: list each size once, in rising order")
    given = [phase.image_size for phase in (params.phase1, params.phase2) if phase.image_size is not None]
    if not given:
        raise SwapError(
            "data.copies is for images that are read from their files: set phase1.image_size and phase2.image_size, or "
            "remove data.copies"
        )
    smallest = min(size for sizes in given for size in by_epoch(sizes).values)
    if copy_for(smallest, copies) is None:
        raise SwapError(
            f"data.copies is {list(copies)}, but no epoch would read them: images of {smallest} pixels are read from "
            f"copies of at least {-(-smallest * 5 // 4)}; add larger ones, or remove data.copies"
        )


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
