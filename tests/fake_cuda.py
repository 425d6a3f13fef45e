"""python tests/fake_cuda.py --precision bf16

The CUDA path without a GPU: the real code on tensors that have a device (`cuda:0`), a shape and strides, but no memory.
torch computes which operations there would be and refuses to mix devices. As a program it prints what a training step
of ResNet-9 costs: operations, each at least one kernel launch, and what the host reads.

`call` runs a function in a process of its own, with a preload that answers for the driver; `fake_cuda` is the block in
which `cuda:0` can be used there.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import itertools
import json
import linecache
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

GPU = torch.device("cuda", 0)
# Autograd asks the driver for the current stream, unless there is no accelerator.
_SHIM = """
#include <cstdint>
#include <optional>
namespace c10 { enum class DeviceType : int8_t; }
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return std::nullopt; }
bool isAccelerator(c10::DeviceType) { return false; }
}
"""
_RESULT = "result on fake CUDA: "


def why_not() -> str:
    """Why fake CUDA cannot be had here; empty if it can."""
    if torch.version.cuda is None:
        return "torch is a CPU build"
    return "" if shutil.which("g++") else "there is no g++"


def call(function: Callable[..., Any], **arguments: Any) -> Any:
    """What a function at the top of a module of tests/ returns, as JSON, in a process with the preload."""
    with tempfile.TemporaryDirectory() as folder:
        source, shim = Path(folder) / "shim.cpp", Path(folder) / "shim.so"
        source.write_text(_SHIM, encoding="utf-8")
        subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(shim)], check=True)
        module = Path(sys.modules[function.__module__].__file__ or "").stem
        program = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import fake_cuda; fake_cuda._child()"
        done = subprocess.run(
            [sys.executable, "-c", program, module, function.__name__, json.dumps(arguments)],
            env={**os.environ, "LD_PRELOAD": str(shim), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
    results = [line.removeprefix(_RESULT) for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode or not results:
        raise AssertionError(f"{function.__name__}({arguments}) gave {done.returncode}\n{done.stdout}\n{done.stderr}")
    return json.loads(results[-1])


def _child() -> None:
    module, name, arguments = sys.argv[1:]
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    print(_RESULT + json.dumps(result), flush=True)
    os._exit(0)  # tensors without memory may crash while Python takes them down


class Seen(TorchDispatchMode):
    """What was asked of the device: `operations` by place, and where the host read or copied something.

    A place is the last line of this project on the way to it, `backward` where autograd's own thread asked.
    """

    # Neither a kernel nor a copy: memory is taken, or looked at in another way.
    _FREE = ("prim::", "empty", "new_empty", "detach", "lift_fresh", "_reshape_alias", "is_pinned")

    def __init__(self) -> None:
        super().__init__()
        self.operations: collections.Counter[str] = collections.Counter()
        self.names: collections.Counter[str] = collections.Counter()
        self.reads: list[str] = []
        self.copies: list[str] = []
        self.fused_steps: list[dict[str, Any]] = []
        self.looks = 0
        """at the device's properties"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in ("_local_scalar_dense", "item"):  # in inference mode the latter is not taken apart
            return self._read(args[0])
        result = self._fused_step(*args, **kwargs) if name == "_fused_sgd_" else func(*args, **kwargs)
        if not (func.is_view or name.startswith(self._FREE)):
            self._note(name, args, kwargs, result)
        return result

    def _read(self, tensor: torch.Tensor) -> float:
        if tensor.device.type == "cuda":
            self.reads.append(_place())
        return 0.0 if tensor.is_floating_point() else 0

    def _note(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        tensors = list(_tensors((args, kwargs, result)))
        devices = {tensor.device.type for tensor in tensors if tensor.ndim} or {t.device.type for t in tensors}
        if "cuda" not in devices:
            return
        place = _place()
        if name in ("_to_copy", "copy_") and len({tensor.device.type for tensor in tensors}) > 1:
            self.copies.append(place)
        self.operations[place] += 1
        self.names[name] += 1

    def _fused_step(self, params: Any, gradients: Any, buffers: Any, *, found_inf: Any = None, **more: Any) -> None:
        """CUDA's kernel walks the three side by side: all have to be on the device and laid out alike."""
        for tensors in zip(params, gradients, *([buffers] if buffers else []), strict=True):
            assert {tensor.device for tensor in tensors} == {GPU}, [tensor.device for tensor in tensors]
            assert len({tensor.stride() for tensor in tensors}) == 1, [tensor.stride() for tensor in tensors]
        assert found_inf is not None and found_inf.device == GPU and found_inf.dtype == torch.float32
        self.fused_steps.append({"params": len(params), **{k: v for k, v in more.items() if isinstance(v, float)}})


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _tensors(part)


def _place() -> str:
    frame = sys._getframe()
    while frame is not None and "/swap_pipeline/" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "backward"
    path, line = frame.f_code.co_filename, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return "backward" if line.endswith(".backward()") else f"{path.rpartition('/swap_pipeline/')[2]}: {line}"


def _apply(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """nn.Module's, which would swap tensors in place; fake ones cannot be."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                changed = change(parameter.detach())
                each._parameters[name] = nn.Parameter(changed, requires_grad=parameter.requires_grad)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = change(buffer)
    return module


@contextlib.contextmanager
def fake_cuda(*, bf16: bool = True) -> Iterator[Seen]:
    """A block in which tensors are fakes and `cuda:0` is there, on a GPU with bf16 or without."""
    seen = Seen()

    def look_for_bf16(including_emulation: bool = True) -> bool:
        seen.looks += 1
        return bf16

    replaced: dict[str, Any] = {
        "torch.cuda.default_generators": (torch.default_generator,),
        "torch.cuda.synchronize": lambda device=None: None,
        "torch.cuda.is_bf16_supported": look_for_bf16,
        "torch.cuda.get_device_name": lambda device=None: "fake GPU",
        "torch.cuda.nccl.version": lambda: (0, 0, 0),
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.nn.Module._apply": _apply,
        # Fakes have no bytes.
        "swap_pipeline.training.snapshots.write_tensors": lambda path, tensors, info, **more: list(tensors),
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(seen)


def training_step(
    *,
    precision: str,
    width: int = 64,
    batch_size: int = 512,
    steps: int = 33,
    channels_last: bool = True,
    ema_decay: float | None = None,
    shards: int = 1,
    optimizer: str = "sgd",
) -> dict[str, Any]:
    """What `train` asks of the device in an epoch of ResNet-9, by step, and what the host reads."""
    from swap_pipeline.config.params import Augment, Compute, Model, Optimizer
    from swap_pipeline.data.images import Images
    from swap_pipeline.engine.distributed import Group
    from swap_pipeline.models.networks import describe_network, new_network
    from swap_pipeline.runtime.progress import Reporter
    from swap_pipeline.training.keeping import Keeping
    from swap_pipeline.training.loop import train
    from swap_pipeline.training.run import Run, TrainingData

    model = Model(name="resnet9", width=width)
    run = Run(
        name="phase1",
        section="phase1",
        seed=0,
        batch_size=lambda epoch: batch_size,
        epochs=1,
        learning_rate=lambda epoch: 0.1,
        shards=shards,
        ema_decay=ema_decay,
    )

    class Steps(Reporter):
        """Called at the end of each step."""

        def step(self, epoch: int, step: int, steps: int) -> None:
            after.append((sum(seen.operations.values()), len(seen.reads), seen.looks))

    with tempfile.TemporaryDirectory() as folder, fake_cuda() as seen:
        make = functools.partial(torch.zeros, device=GPU)
        pixels, labels = make(steps * batch_size, 3, 32, 32, dtype=torch.uint8), make(steps * batch_size).long()
        images = Images(pixels=pixels, labels=labels, mean=make(1, 3, 1, 1), std=make(1, 3, 1, 1))
        network = new_network(describe_network(model, channels=3, num_classes=10), seed=0)
        after: list[tuple[int, int, int]] = []
        train(
            run,
            network,
            TrainingData(
                train=images, held_out=images, augment=Augment(padding=4, flip=True, cutout=8), num_classes=10
            ),
            optimizer=Optimizer(name=optimizer),
            compute=Compute(precision=precision, channels_last=channels_last),  # type: ignore[arg-type]
            group=Group(rank=0, world_size=1, device=GPU),
            keeping=Keeping(snapshots=Path(folder), reporter=Steps(name="", total=1, folder=None, is_main=False)),
        )
    by_step = [later[0] - earlier[0] for earlier, later in itertools.pairwise(after)]
    return {
        "operations": sum(by_step) / len(by_step),
        "most_operations": max(by_step),
        "reads_within_steps": after[-1][1] - after[0][1],
        "looks_within_steps": after[-1][2] - after[0][2],
        "reads": dict(collections.Counter(seen.reads)),
        "copies": dict(collections.Counter(seen.copies)),
        "by_place": dict(seen.operations.most_common()),
        "names": dict(seen.names.most_common()),
        "fused_steps": len(seen.fused_steps),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a training step of ResNet-9 asks of a GPU.")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "tf32", "bf16", "fp16"])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=512)
    import fake_cuda as this  # under its own name, by which the child finds the function

    print(json.dumps(this.call(this.training_step, **vars(parser.parse_args())), indent=2))
