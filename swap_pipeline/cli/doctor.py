"""`swap doctor`: checks of the machine and the project, each with what to do about a problem.

Checks are independent: if one fails, the others still run. Nothing is changed, trained or downloaded.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swap_pipeline.analysis.params import ANALYSIS_PARAMS, read_analysis
from swap_pipeline.cli.amounts import in_bytes
from swap_pipeline.cli.clean import look
from swap_pipeline.cli.findings import Finding, note, ok, problem
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.datasets.check import check
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.devices import (
    Share,
    launcher_kind,
    local_machine,
    mps_runs,
    share_of_phase1,
    share_of_worker,
    this_machine,
)
from swap_pipeline.report.git import changed_files, git, refusal
from swap_pipeline.runtime import environment, gpus
from swap_pipeline.runtime.environment import find_root
from swap_pipeline.runtime.job_folder import scratch_root

if TYPE_CHECKING:
    from swap_pipeline.cli.plan.plan import Plan


_SHOWN = ("torch", "torchvision", "dvc", "safetensors", "swap-pipeline")
# A checkpoint is in scratch, in the workspace and in DVC's cache; links may save some of that.
_COPIES_OF_CHECKPOINTS = 3
_COPIES_OF_IMAGES = 2
_SNAPSHOTS_OF_A_JOB = 3
"""the last two, and the one being written"""


def examine(file: Path = Path("params.yaml")) -> list[Finding]:
    """All findings about this machine, this folder and a params file."""
    params = _read(file)
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", _versions),
        ("project", _project),
        ("params", lambda: _params(file)),
        ("analysis", _analysis),
        ("devices", _devices),
        ("sharing", _sharing),
        ("threads", lambda: _threads(params)),
        ("precision", lambda: _precision(params)),
        ("data", lambda: _data(params)),
        ("plan and disk", lambda: _plan_and_disk(params)),
        ("scratch", lambda: _scratch(params)),
        ("DVC", _dvc),
        ("git", _git_state),
    ]
    found = [finding for topic, check in checks for finding in safely(topic, check)]
    return list({finding.text: finding for finding in reversed(found)}.values())[::-1]  # several may report the same


def text_of(findings: Sequence[Finding]) -> str:
    """A line for each finding, and a conclusion."""
    widest = max(len(finding.topic) for finding in findings)
    lines = [f"{finding.status:7}  {finding.topic:{widest}}  {finding.text}" for finding in findings]
    problems, notes = (sum(finding.status == status for finding in findings) for status in ("problem", "note"))
    if problems:
        end = f"{problems} problem{'s' if problems > 1 else ''} to fix before `dvc repro` can run"
    else:
        end = f"`dvc repro` can run{f'; {notes} note' if notes else ''}{'s' if notes > 1 else ''}"
    return "\n".join([*lines, "", end])


def json_of(findings: Sequence[Finding]) -> str:
    problems = sum(finding.status == "problem" for finding in findings)
    return json.dumps({"problems": problems, "findings": [dataclasses.asdict(each) for each in findings]}, indent=2)


def safely(topic: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except SwapError as error:
        yield Finding(status="problem", topic=topic, text=str(error))
    except Exception as error:  # the other checks must still run
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        yield Finding(status="note", topic=topic, text=f"could not be checked ({what})")


def _read(file: Path) -> Params | None:
    try:
        return read_params(file)
    except SwapError:
        return None  # reported by the check of the params


def _versions() -> Iterator[Finding]:
    yield ok("python", f"{platform.python_version()} ({sys.executable})")
    found = {name: _version(name) for name in _SHOWN}
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in found.items() if version))
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in importlib.metadata.requires("swap-pipeline") or ()]
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            have = "missing" if version is None else version
            remedy = "pip install -c constraints.txt -e ."
            yield problem("versions", f"{requirement.name} is {have}, but must be {requirement.specifier}: `{remedy}`")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _project() -> Iterator[Finding]:
    missing = [name for name in ("dvc.yaml", ".dvc", "stages", "swap_pipeline") if not Path(name).exists()]
    if missing:
        yield problem("project", f"{Path.cwd()} lacks {', '.join(missing)}: run this from the project's root folder")
    elif not os.access(".", os.W_OK):
        yield problem("project", f"{Path.cwd()} is not writable: change its permissions, or copy the project")
    else:
        yield ok("project", str(Path.cwd()))


def _params(file: Path) -> Iterator[Finding]:
    params = check(file)
    yield ok("params", f"{file}: recipe {params.recipe}, {len(params.workers.seeds)} workers")


def _analysis() -> Iterator[Finding]:
    """Its errors are only notes, since `dvc repro` does not run it."""
    try:
        given = read_analysis()
    except SwapError as error:
        yield note("analysis", f"`make analysis` would stop: {error}")
    else:
        yield ok("analysis", f"{ANALYSIS_PARAMS}: landscapes of {given.grid} × {given.grid} points")


def _devices() -> Iterator[Finding]:
    from torch import distributed

    machine, kind = this_machine(), launcher_kind()
    if kind != "local":
        what = "GPUs" if machine.device_type == "cuda" else "CPU cores"
        yield ok("devices", f"{machine.nodes} × {len(machine.devices)} {what} of a Slurm cluster, with {kind}")
        return
    backends = [
        name
        for name, there in (("nccl", distributed.is_nccl_available()), ("gloo", distributed.is_gloo_available()))
        if there
    ]
    seen, built = gpus.look(), gpus.built_for()
    if machine.device_type == "cuda":
        assert seen.cuda is not None
        yield ok("devices", f"{len(seen.found)} GPUs: {', '.join(gpu.model for gpu in seen.found)}")
        driver = ".".join(map(str, seen.cuda))
        yield ok("devices", f"the driver supports CUDA {driver}, torch was built for CUDA {built.cuda}")
        kinds = dict.fromkeys((gpu.model, gpu.capability) for gpu in seen.found)
        for why in (gpus.unfit(model, capability, _kernels()) for model, capability in kinds):
            if why:
                yield problem("devices", why)
        if any(gpu.is_mig for gpu in seen.found):
            yield note("devices", "this is a MIG instance, and CUDA lets a process use only one")
    else:
        unused = f", not its {len(seen.found)} GPUs (SWAP_DEVICE)" if seen.found else ", no GPU"
        yield ok("devices", f"the CPU is used{unused}")
    wanted = "nccl" if machine.device_type == "cuda" else "gloo"
    yield ok("backends", f"{wanted} is used; this torch has {', '.join(backends) or 'none'}")
    if wanted not in backends:
        yield problem("backends", f"this torch lacks {wanted}, which several ranks need: set SWAP_NPROC=1")


def _kernels() -> list[str]:
    """GPU architectures that the installed torch was built for; some releases report them only if there is a GPU."""
    import torch

    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    return torch.cuda.get_arch_list() or ((flags and flags()) or "").split()


def _sharing() -> Iterator[Finding]:
    if (workers := environment.workers_per_gpu()) == 1 or local_machine().device_type == "cpu":
        return
    shared = f"{workers} workers of phase 2 share a GPU (SWAP_WORKERS_PER_GPU)"
    if mps_runs():
        yield ok("sharing", f"{shared}, and MPS is running")
    else:
        start = "nvidia-cuda-mps-control -d"
        yield note("sharing", f"{shared}, but MPS is not running, so they take turns: start it (`{start}`)")


def _threads(params: Params | None) -> Iterator[Finding]:
    from swap_pipeline.cli.plan.plan import counted

    def text_of(share: Share) -> str:
        processes = f"{share.processes} process{'' if share.processes == 1 else 'es'}"
        return f"{processes} with {counted(share.threads, 'thread')} each"

    machine = this_machine()
    yield ok("threads", counted(machine.cores, "core"))
    if params is not None:
        at_most = environment.num_processes()
        share = share_of_phase1(machine, shards=params.phase1.shards, at_most=at_most)
        yield ok("threads", f"phases 1 and 3: {text_of(share)}")
        worker, seeds = share_of_worker(machine, shards=params.phase2.shards), len(params.workers.seeds)
        slots = environment.max_workers_at_once(default=machine.num_devices)
        at_once = min(slots, machine.num_devices // worker.num_devices, seeds)
        yield ok("threads", f"phase 2: {at_once} of {seeds} workers at once, {text_of(worker)}")
    environment.fan_out(), environment.eval_batch_size(), environment.timeout_minutes()  # errors if set wrongly
    environment.num_loaders(1), environment.snapshot_seconds()


def _precision(params: Params | None) -> Iterator[Finding]:
    import torch

    from swap_pipeline.engine.precision import check_cpu, resolve

    kind = local_machine().device_type
    used = None if params is None else resolve(params.compute.precision, torch.device(kind))
    if params is not None:
        yield ok("precision", f"{used} (compute.precision: {params.compute.precision})")
    if kind == "cpu":
        for half in ("bf16", "fp16") if used == "fp16" else ("bf16",):
            try:
                check_cpu(half)
                yield ok("precision", f"this CPU supports {half}")
            except SwapError as error:
                if used == half:
                    raise
                why = str(error).partition("(")[2].partition(")")[0]
                yield note("precision", f"this CPU lacks {half} ({why}): leave compute.precision at auto or fp32")


def _data(params: Params | None) -> Iterator[Finding]:
    if params is None:
        return
    from swap_pipeline.datasets.arrays import FASHION_MINI, missing_files
    from swap_pipeline.datasets.image_folders import scan
    from swap_pipeline.datasets.prepare import TEST_FOLDERS, unknown

    data = params.data
    if data.name in TEST_FOLDERS:
        tree = scan(find_root(data.root), test_names=TEST_FOLDERS[data.name])
        counts = f"{len(tree.train):,} training and {len(tree.test):,} test images of {len(tree.classes):,} classes"
        yield ok("data", f"{data.name}: {counts} in {tree.root}")
    elif data.name == "fashion-mini":
        if not FASHION_MINI.is_file():
            raise SwapError(f"{FASHION_MINI} is missing: restore it with `git checkout {FASHION_MINI}`")
        yield ok("data", f"{data.name}: in this repository")
    elif (missing := missing_files(data)) is None:
        raise unknown(data.name)
    elif missing:
        yield note("data", f"{data.name}: {', '.join(missing)} will be downloaded, unless you put it into {data.root}")
    else:
        yield ok("data", f"{data.name}: found its official files")


def _plan_and_disk(params: Params | None) -> Iterator[Finding]:
    """What `dvc repro` will do, and how much it will write."""
    if params is None:
        return
    from swap_pipeline.cli.plan.facts import devices_here
    from swap_pipeline.cli.plan.forecast import plan_params

    plan = plan_params(params, devices_here(params))
    yield ok("plan", f"{plan.network.name}, {plan.network.num_parameters:,} parameters: see `swap plan`")
    needed, free = bytes_to_write(plan), shutil.disk_usage(".").free
    text = f"{in_bytes(free)} free; a whole run writes up to {in_bytes(needed)}"
    if free >= needed:
        yield ok("disk", text)
    elif Path("checkpoints/phase3/model.safetensors").exists():
        yield note("disk", f"{text}: enough for the present one, but not for another: `swap clean` may help")
    else:
        yield problem("disk", f"{text}: free some space, for example with `swap clean` or `dvc gc -w`")


def bytes_to_write(plan: Plan) -> int:
    """At most, for the plain pipeline: checkpoints, snapshots of jobs that run side by side and of phase 1's course,
    and prepared images."""
    checkpoints = (plan.num_checkpoints + plan.num_kept) * plan.checkpoint_bytes * _COPIES_OF_CHECKPOINTS
    snapshots = (_SNAPSHOTS_OF_A_JOB * plan.slots + plan.num_snapshots) * plan.snapshot_bytes
    facts = plan.data
    # For images that stay in their files: a path, a label and a digest.
    image_bytes = 200 if facts.size is None else facts.channels * facts.size[0] * facts.size[1] + 8
    images = sum(facts.counts.values()) * image_bytes + facts.copies_bytes
    return int(checkpoints + snapshots + _COPIES_OF_IMAGES * images)


def _scratch(params: Params | None) -> Iterator[Finding]:
    if os.path.lexists(scratch_root()) and not scratch_root().is_dir():
        yield problem("scratch", f"{scratch_root()} must be a folder, but is something else: move it elsewhere")
        return
    if not scratch_root().is_dir():
        yield ok("scratch", f"{scratch_root()} does not exist yet")
        return
    entries = look(everything=params is None)
    total = in_bytes(sum(entry.num_bytes for entry in entries))
    where = f"{scratch_root()}: {len(entries)} folders, {total}"
    if params is None:
        yield note("scratch", f"{where}; which of them are needed depends on the params")
        return
    running = [entry.path.parent.name for entry in entries if entry.is_running]
    if running:
        yield note("scratch", f"running now: {', '.join(running)}")
    stale = [entry for entry in entries if not entry.is_needed and not entry.is_running]
    if stale:
        freed = in_bytes(sum(entry.num_bytes for entry in stale))
        yield note("scratch", f"{where}; the current params do not use {len(stale)}, `swap clean` frees {freed}")
    else:
        yield ok("scratch", where)


def _dvc() -> Iterator[Finding]:
    from dvc.exceptions import DvcException, NotDvcRepoError
    from dvc.repo import Repo
    from dvc_objects.fs import generic

    try:
        with Repo() as repo:
            cache = repo.cache.local
            # DVC creates it in the first run.
            there = next(path for path in (Path(cache.path), *Path(cache.path).parents) if path.is_dir())
            allowed = list(cache.cache_types)
            links = generic.test_links(allowed, cache.fs, str(there), repo.fs, repo.root_dir)
    except NotDvcRepoError:
        yield problem("DVC", f"{Path.cwd()} is not a DVC project: run this in the project's root folder or `dvc init`")
        return
    except DvcException as error:
        yield problem("DVC", " ".join(str(error).split()))
        return
    if not cache.path.isascii():  # experiments get a config with it, which DVC writes in ASCII
        yield note("DVC", f"{cache.path} is not all ASCII, so `dvc exp run --temp` and `swap compare` fail: rename it")
    link = links[0] if links else "copy"
    text = f"cache in {cache.path}, checked out as {link} (cache.type: {', '.join(allowed)})"
    saving = "`dvc config --local cache.type hardlink,copy` avoids that, but makes outputs read-only"
    twice = f"{text}, so each file is on the disk twice: {saving}"
    yield note("DVC", twice) if link == "copy" else ok("DVC", text)


def _needs_git() -> bool:
    from dvc.config import Config

    return not Config.from_cwd().get("core", {}).get("no_scm")


def _git_state() -> Iterator[Finding]:
    if why := refusal():
        yield note("git", why)  # DVC still runs the pipeline, but no experiments
        return
    if git("rev-parse", "--show-toplevel") is None:
        if not _needs_git():
            yield note("git", "DVC is set up without it: `dvc repro` runs, but there are no experiments")
            return
        yield problem("git", "this is not a git repository, which DVC needs: `git init`, or clone the project")
        return
    if git("rev-parse", "--verify", "--quiet", "HEAD") is None:
        yield note("git", "nothing is committed yet: experiments need a commit to start from")
        return
    head = f"{git('rev-parse', '--abbrev-ref', 'HEAD')} at {git('rev-parse', '--short', 'HEAD')}"
    changed = changed_files() or []
    some = ", ".join(changed[:3]) + (" …" if len(changed) > 3 else "")
    uncommitted = f"{head}, {len(changed)} uncommitted files ({some})"
    yield note("git", uncommitted) if changed else ok("git", f"{head}, everything committed")
