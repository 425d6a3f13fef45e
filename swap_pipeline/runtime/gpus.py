"""What the driver reports about the GPUs here, and why the installed torch cannot use them; without importing torch,
which takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swap_pipeline.runtime.environment import device_type

_NO_DEVICE, _STUB = 100, 34  # cuInit's error codes without a GPU; a stub is what the toolkit links against
_MAJOR, _MINOR = 75, 76  # attributes of a device
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""by major version of CUDA, on Linux"""
_HOW = "see docs/gpus.md"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that this process may use."""

    name: str
    """as in CUDA_VISIBLE_DEVICES, or its index"""
    uuid: str
    """the same however it is named"""
    model: str
    capability: tuple[int, int]

    @property
    def is_mig(self) -> bool:
        return " MIG " in f"{self.model} " or self.name.startswith("MIG-")


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs found, and why they cannot be used; `trouble` is empty if they can, or if there are none."""

    found: tuple[Gpu, ...] = ()
    cuda: tuple[int, int] | None = None
    """the newest version that the driver supports"""
    trouble: str = ""


def look() -> Gpus:
    """Ask the driver; unlike nvidia-smi, it respects CUDA_VISIBLE_DEVICES."""
    built = built_for()
    if built.hip:
        return Gpus(
            trouble=f"this torch is built for ROCm {built.hip}, and AMD GPUs are not supported: install one for CUDA"
        )
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Gpus()
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    cuda = version.value // 1000, version.value % 1000 // 10
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code in (_NO_DEVICE, _STUB):
        return Gpus(cuda=cuda)
    if code:
        return Gpus(
            cuda=cuda,
            trouble=f"the GPU driver does not start (CUDA error {code}): check `nvidia-smi`, restart the machine",
        )
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = named or [str(index) for index in range(count.value)]
    found = tuple(_ask(driver, index, name) for index, name in enumerate(names[: count.value]))
    return Gpus(found=found, cuda=cuda, trouble=_too_many(named, found) or _too_old(cuda, built))


def _ask(driver: ctypes.CDLL, index: int, name: str) -> Gpu:
    device, text, raw = ctypes.c_int(0), ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(text, len(text), device)
    # Version 2 tells instances of one GPU (MIG) apart; drivers before CUDA 11.4 lack it.
    (driver.cuDeviceGetUuid_v2 if hasattr(driver, "cuDeviceGetUuid_v2") else driver.cuDeviceGetUuid)(raw, device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Gpu(
        name=name,
        uuid=str(uuid.UUID(bytes=raw.raw)),
        model=text.value.decode(errors="replace"),
        capability=(major.value, minor.value),
    )


def _too_many(named: Sequence[str], found: Sequence[Gpu]) -> str:
    if len(named) <= len(found):
        return ""
    if any(gpu.is_mig for gpu in found):
        return (
            f"CUDA_VISIBLE_DEVICES names {len(named)} MIG instances, but CUDA lets a process use only one: "
            f"set it to {found[0].name}"
        )
    return (
        f"CUDA_VISIBLE_DEVICES names {len(named)} GPUs, but the driver sees only the first {len(found)}: "
        f"remove {', '.join(named[len(found) :])}"
    )


@dataclass(frozen=True, kw_only=True)
class Built:
    """What the installed torch was built for, according to its version.py."""

    torch: str
    cuda: str
    hip: str


def built_for() -> Built:
    spec = importlib.util.find_spec("torch")
    folders = (spec and spec.submodule_search_locations) or ()
    texts = [path.read_text(encoding="utf-8") for each in folders if (path := Path(each) / "version.py").is_file()]
    pattern = r"^(__version__|cuda|hip)\b[^=\n]*=\s*['\"]([^'\"\n]*)['\"]"
    found = {key: value for text in texts for key, value in re.findall(pattern, text, re.MULTILINE)}
    return Built(torch=found.get("__version__", "?"), cuda=found.get("cuda", ""), hip=found.get("hip", ""))


def _too_old(cuda: tuple[int, int], built: Built) -> str:
    """A driver runs code built for its own major version of CUDA or an older one."""
    if not built.cuda:
        return f"there are GPUs, but this torch ({built.torch}) is for CPUs only: install one for CUDA, {_HOW}"
    needed = int(built.cuda.partition(".")[0])
    if cuda[0] >= needed:
        return ""
    driver = f" to {_OLDEST_DRIVER[needed]} or newer" if needed in _OLDEST_DRIVER else ""
    return (
        f"the GPU driver supports CUDA {cuda[0]}.{cuda[1]}, but torch {built.torch} needs CUDA {needed}: "
        f"update the driver{driver}, or install a torch for CUDA {cuda[0]}, {_HOW}"
    )


def unfit(model: str, capability: tuple[int, int], kernels: Sequence[str]) -> str:
    """Why a torch with these `kernels` (sm_80 …) cannot compute on a GPU; empty if it can.

    Machine code runs on the same major version from its minor version on, `compute_…` on any GPU at least as new.
    """
    major, minor = capability
    if not kernels:
        return ""  # not known
    for kernel in kernels:
        kind, _, digits = kernel.rstrip("af").partition("_")
        built = int(digits[:-1]), int(digits[-1])
        if (kind == "sm" and built[0] == major and built[1] <= minor) or (kind == "compute" and built <= capability):
            return ""
    return (
        f"torch {built_for().torch} has no kernels for {model} (sm_{major}{minor}), only for {', '.join(kernels)}: "
        f"install a torch that has them, {_HOW}"
    )


def device_type_of_rank() -> str:
    """For a process that computes: `cuda` or `cpu`, as torch sees it."""
    import torch

    usable = torch.cuda.is_available() and not torch.version.hip
    return device_type(has_gpu=usable, trouble="" if usable else look().trouble)
