"""torch.compile and bf16, each against the default: should they be the default?

The real loop in one process with all cores, ResNet-9 width 16. Compilation itself takes place in an earlier epoch that
is not timed. bf16 is tried as it is and, if this CPU does not support what it claims, with oneDNN limited
(ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16).

The default on a CPU is fp32 without compilation: bf16 is many times slower on a CPU without hardware for it, and
compilation must pay off within runs of minutes. GPUs report whether they have bf16, and then use it, or else fp16;
whether compilation pays off is not known in advance, so it is a param (`compute.compile`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from benchmarks import loops, made_up
from benchmarks.children import environment, result_of, start
from benchmarks.harness import Sample
from benchmarks.options import Options
from benchmarks.results import Row, compared, left_out

_PROBE = "from swap_pipeline.engine.precision import check_cpu; check_cpu('bf16')"


def measure(options: Options) -> Iterator[Row]:
    width, batch_size = options.sized(16, 4), options.sized(128, 16)
    # bf16 without hardware for it takes seconds per step.
    for name, words, steps in (("compiled", "torch.compile", 16), ("bf16", "bf16", 1)):
        key, what = f"precision/{name}", f"{words}, ResNet-9 width {width}, batch {batch_size}"
        extra = _environment_for_bf16() if name == "bf16" else {}
        if extra is None:
            yield left_out(key, what, other="fp32", unit="images/s", why="this CPU cannot run bf16")
            continue
        prepared = options.scratch / f"prepared_{name}"
        made_up.write_prepared(prepared, num_train=options.sized(steps, 1) * batch_size, num_test=16)
        arguments = {
            "prepared": str(prepared),
            "width": width,
            "batch_size": batch_size,
            "rounds": options.rounds,
            "contestants": [name, "ours"],
        }
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(options.scratch / "compiled")}
        try:
            found = result_of(start(loops.in_turns, arguments, threads=options.cores, more={**cache, **extra}))
        except RuntimeError as error:
            why = f"{words} does not work here: {str(error).strip().splitlines()[-1][:200]}"
            yield left_out(key, what, other="the default", unit="images/s", why=why)
            continue
        yield compared(
            key,
            what,
            ours=(words, Sample(tuple(found[name]))),
            other=("the default: fp32, not compiled", Sample(tuple(found["ours"]))),
            unit="images/s",
            note=f"with {', '.join(f'{k}={v}' for k, v in extra.items())}" if extra else "",
        )


def _environment_for_bf16() -> dict[str, str] | None:
    """Environment variables that this CPU needs to run bf16; None if it cannot."""
    for extra in ({}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}):
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], env=environment(threads=1, more=extra), capture_output=True
        )
        if done.returncode == 0:
            return extra
    return None
