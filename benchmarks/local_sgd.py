"""Local SGD on a CPU: two ranks over a slow link that exchange every 16 steps, against every step.

The real stage, `python -m stages.phase1`, in a copy of this project; images a second of the last epoch, as its record
says. Both ranks are in a network namespace of their own, whose loopback lets through 20 Mbit a second (tc's token
bucket): a shared link, on which both directions count. A third measurement, with an exchange at every step over the
loopback as it is, says how much of the time is the link's; it is in the note.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.harness import divided, interleaved
from benchmarks.made_up import Project, write_prepared
from benchmarks.options import Options
from benchmarks.results import Limit, Row, compared, left_out, number
from swap_pipeline.storage.files import read_json

_EVERY, _MBIT = 16, 20
# A packet of the loopback is larger than what tc lets through at once by default.
_SHAPED = f"tc qdisc add dev lo root tbf rate {_MBIT}mbit burst 256kb latency 1s"
_LIMIT = Limit(">", 1)
_OTHER = "an exchange at every step"


def measure(options: Options) -> Iterator[Row]:
    key = "local_sgd/slow_link"
    what = f"phase 1 over a link of {_MBIT} Mbit/s, ResNet-9 width 8, 28 px, 2 ranks, global batch 480"
    why = "there is one core" if options.cores < 2 else _why_not()
    if why:
        yield left_out(key, what, other=_OTHER, unit="images/s", why=why, limit=_LIMIT)
        return
    params: dict[str, Any] = {"model.width": 8, "phase1.max_epochs": 2, "phase1.stop_accuracy": 100.0}
    params |= {"phase1.batch_size": 480, "phase1.keep_epochs": [1], "phase1.peak_lr": 0.01}
    params |= {"phase1.warmup_epochs": 0, "phase1.shards": 2}
    project = Project.copy(options.scratch / "local_sgd", params)
    num_images = options.sized(2 * _EVERY, 2) * 480
    write_prepared(project.root / "data" / "prepared", num_train=num_images, num_test=64, shape=(1, 28, 28))

    def images_per_second(sync_steps: int, link: str) -> float:
        project.forget_scratch("phase1")
        project.set_params({"phase1.sync_steps": sync_steps})
        project.run(*_in_namespace(link), sys.executable, "-m", "stages.phase1", **_TWO_RANKS)
        return num_images / float(read_json(project.root / "metrics" / "phase1.json")["curve"][-1]["seconds"])

    found = interleaved(
        {
            "local": functools.partial(images_per_second, _EVERY, _SHAPED),
            "every": functools.partial(images_per_second, 1, _SHAPED),
            "fast": functools.partial(images_per_second, 1, "true"),
        },
        rounds=options.rounds,
        warm_up=options.sized(1, 0),
        say=options.say,
    )
    slowed = number(divided(found["every"], found["fast"]).median)
    yield compared(
        key,
        what,
        ours=(f"sync_steps: {_EVERY}", found["local"]),
        other=(_OTHER, found["every"]),
        unit="images/s",
        limit=_LIMIT,
        note=f"Local SGD: with an exchange at every step, this link leaves {slowed} of the speed over a loopback that "
        f"is not slowed down.",
        more={"loopback_as_it_is": found["fast"].as_json()},
    )


_TWO_RANKS = {"SWAP_NPROC": "2", "GLOO_SOCKET_IFNAME": "lo"}


def _in_namespace(link: str) -> list[str]:
    """The beginning of a command that runs with a network of its own."""
    return ["unshare", "--net", "sh", "-c", f'ip link set lo up && {link} && exec "$@"', "sh"]


def _why_not() -> str:
    try:
        done = subprocess.run([*_in_namespace(_SHAPED), "true"], capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no unshare"
    said = (done.stderr.strip().splitlines() or ["?"])[-1]
    return f"no link can be slowed down here ({said})" if done.returncode else ""
