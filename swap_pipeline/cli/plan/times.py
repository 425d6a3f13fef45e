"""How long a plan takes, from the speed of one device."""

from __future__ import annotations

from dataclasses import dataclass

from swap_pipeline.cli.plan.plan import PASSES, Plan, RunPlan, Size


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """How fast one device trains."""

    images_per_second: float
    image_size: Size
    source: str
    """for the user: where the number comes from"""
    measured_on: str | None
    """`GPU` or `CPU core`; None if given by the user"""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Wall-clock seconds, and device-seconds."""

    seconds: float
    device_seconds: float


@dataclass(frozen=True, kw_only=True)
class Times:
    """Expected times of all phases."""

    phase1: Expected
    worker: Expected
    phase2: Expected
    phase3: Expected
    total: Expected
    """of all phases on the plan's devices"""
    critical_path: float
    """seconds with devices for all workers at the same time, as in the report"""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Everything that `swap plan` shows."""

    title: str
    plan: Plan
    throughput: Throughput
    times: Times


def expected_times(plan: Plan, throughput: Throughput) -> Times:
    """Seconds of training alone, assuming that n devices are n times as fast and that time is proportional to FLOPs."""
    flops = plan.network.flops
    flops_per_second = throughput.images_per_second * PASSES * flops[throughput.image_size]

    def of_run(run: RunPlan) -> Expected:
        busy = run.flops / flops_per_second
        return Expected(seconds=busy / run.devices, device_seconds=busy)

    worker, phase3 = of_run(plan.worker), plan.phase3
    testing = plan.forks.tests * plan.forks.flops_of_busiest / flops_per_second
    testing_seconds = testing * plan.phase1.processes / plan.phase1.devices  # threads share the work of their process
    phase1 = _sum(
        of_run(plan.phase1),
        Expected(seconds=testing_seconds, device_seconds=testing_seconds * plan.phase1.devices),
    )
    phase2 = Expected(seconds=plan.rounds * worker.seconds, device_seconds=plan.num_workers * worker.device_seconds)
    forward = flops[phase3.image_size] / flops_per_second
    statistics_seconds = phase3.samples_of_busiest * forward / (phase3.devices / phase3.processes)
    statistics = Expected(seconds=statistics_seconds, device_seconds=statistics_seconds * phase3.devices)
    return Times(
        phase1=phase1,
        worker=worker,
        phase2=phase2,
        phase3=statistics,
        total=_sum(phase1, phase2, statistics),
        critical_path=_sum(phase1, worker, statistics).seconds,
    )


def _sum(*parts: Expected) -> Expected:
    return Expected(
        seconds=sum(part.seconds for part in parts), device_seconds=sum(part.device_seconds for part in parts)
    )
