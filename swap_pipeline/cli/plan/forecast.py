"""From params to a forecast: gathers facts, plans the work, and measures the speed unless it is given."""

from __future__ import annotations

import sys
from pathlib import Path

from swap_pipeline.cli.plan.facts import data_facts, devices_here, network_facts, optimizer_bytes, planned_devices
from swap_pipeline.cli.plan.plan import Devices, Plan, image_sizes, make_plan
from swap_pipeline.cli.plan.throughput import kept_rate, measure_throughput
from swap_pipeline.cli.plan.times import Forecast, Throughput, expected_times
from swap_pipeline.config.params import Params
from swap_pipeline.errors import SwapError


def make_forecast(
    params: Params,
    *,
    file: Path,
    num_gpus: int | None,
    images_per_second: float | None,
) -> Forecast:
    """Plan for `num_gpus`, or for this machine; errors come before anything is measured."""
    try:
        plan = plan_params(params, devices_here(params) if num_gpus is None else planned_devices(params, num_gpus))
        throughput = _throughput(params, plan, images_per_second)
    except SwapError as error:
        # Elsewhere errors name params.yaml; here it may be another file.
        raise SwapError(f"{file}: {str(error).removeprefix('params.yaml: ')}") from None
    recipe = "" if params.recipe == file.stem else f" (recipe {params.recipe})"
    return Forecast(
        title=f"{file}{recipe}",
        plan=plan,
        throughput=throughput,
        times=expected_times(plan, throughput),
    )


def plan_params(params: Params, devices: Devices) -> Plan:
    """What these params will do on these devices."""
    data = data_facts(params.data)
    network = network_facts(
        params.model, channels=data.channels, num_classes=data.num_classes, sizes=image_sizes(params, data)
    )
    state = max(optimizer_bytes(each, network) for each in params.optimizers)
    return make_plan(params, data=data, network=network, devices=devices, optimizer_bytes=state)


def _throughput(params: Params, plan: Plan, images_per_second: float | None) -> Throughput:
    first = plan.phase1.stretches[0]
    if images_per_second is not None:
        return Throughput(
            images_per_second=images_per_second,
            image_size=first.image_size,
            source="given with --images-per-second",
            measured_on=None,
        )
    if (kept := kept_rate(params, plan)) is not None:
        return kept
    print("measuring this machine's training speed for a few seconds …", file=sys.stderr, flush=True)
    return measure_throughput(
        params.model,
        channels=plan.data.channels,
        num_classes=plan.data.num_classes,
        image_size=first.image_size,
        batch_size=first.batch_per_shard,
        optimizer=params.optimizers[0],
        compute=params.compute,
    )
