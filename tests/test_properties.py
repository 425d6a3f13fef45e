"""What must hold for all inputs, tried on some hundred that hypothesis thinks of."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import tempfile
import typing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from swap_pipeline.averaging.mean import average_files
from swap_pipeline.config.params import Augment, Params, Schedule
from swap_pipeline.config.reading import parse_params
from swap_pipeline.config.schedules import PiecewiseLinear, by_epoch, learning_rate_of
from swap_pipeline.data.epochs import batch_share, draw_epoch, steps_per_epoch
from swap_pipeline.errors import SwapError
from swap_pipeline.storage.tensor_files import read_tensors, write_tensors

# Reproducible, and without limits of time: what else the machine does is not the code's fault.
settings.register_profile("swap", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("swap")

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# --- averaging


@st.composite
def weights(draw: st.DrawFn) -> list[dict[str, torch.Tensor]]:
    """Some workers' tensors: alike in names, shapes and types."""
    layout = draw(
        st.dictionaries(
            st.text("ab.", min_size=1, max_size=4),
            st.tuples(st.sampled_from(FLOATS), st.lists(st.integers(0, 3), max_size=3)),
            min_size=1,
            max_size=3,
        )
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from((1e-3, 1.0, 1e3)))
    return [
        {
            key: (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
            for key, (dtype, shape) in layout.items()
        }
        for _ in range(draw(st.integers(1, 5)))
    ]


def averaged(workers: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.safetensors" for number in range(len(workers))]
        for path, tensors in zip(paths, workers, strict=True):
            write_tensors(path, tensors, {}, durable=False)
        average_files(paths, Path(folder) / "mean", {})
        return {key: tensor.clone() for key, tensor in read_tensors(Path(folder) / "mean")[0].items()}


@given(weights())
def test_the_average_is_the_mean_in_float64_rounded_once(workers: list[dict[str, torch.Tensor]]) -> None:
    found = averaged(workers)
    for key, first in workers[0].items():
        total = np.sum([worker[key].double().numpy() for worker in workers], axis=0, dtype=np.float64)
        expected = torch.from_numpy(np.asarray(total / len(workers))).to(first.dtype)
        assert (found[key].dtype, found[key].shape) == (first.dtype, first.shape)
        # The last bit of float64 may depend on the order of the sum.
        torch.testing.assert_close(found[key], expected, rtol=1e-14 if first.dtype == torch.float64 else 0, atol=1e-300)


@given(weights(), st.randoms(use_true_random=False))
def test_the_order_of_the_workers_changes_nothing_but_the_last_bit_of_float64(
    workers: list[dict[str, torch.Tensor]], chance: Any
) -> None:
    shuffled = list(workers)
    chance.shuffle(shuffled)
    one, two = averaged(workers), averaged(shuffled)
    for key, tensor in one.items():
        ulps = 4 if tensor.dtype == torch.float64 else 1
        gap = (tensor.double() - two[key].double()).abs()
        largest = torch.stack([worker[key].double().abs() for worker in workers]).amax(0)
        assert (gap <= ulps * torch.finfo(tensor.dtype).eps * largest).all()


@given(weights(), st.integers(1, 5))
def test_the_average_of_equal_files_is_that_file(workers: list[dict[str, torch.Tensor]], number: int) -> None:
    found = averaged([workers[0]] * number)
    for key, tensor in workers[0].items():
        if tensor.dtype == torch.float64:  # 3x / 3 may be off by one bit
            torch.testing.assert_close(found[key], tensor, rtol=1e-15, atol=0)
        else:
            assert torch.equal(found[key], tensor)


# --- schedules


rates = st.floats(0, 100, allow_subnormal=False)


@st.composite
def knots(draw: st.DrawFn) -> list[tuple[float, float]]:
    epochs = sorted(draw(st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True)))
    return [(float(epoch), draw(rates)) for epoch in (0, *epochs)]


@given(knots(), st.floats(-1, 50))
def test_a_rate_hits_its_knots_and_stays_between_its_neighbours(
    course: list[tuple[float, float]], epoch: float
) -> None:
    rate = PiecewiseLinear([at for at, _ in course], [value for _, value in course])
    assert [rate(at) for at, _ in course] == [value for _, value in course]
    before = [value for at, value in course if at <= epoch][-1:] or [course[0][1]]
    after = [value for at, value in course if at > epoch][:1] or [course[-1][1]]
    low, high = min(*before, *after), max(*before, *after)
    assert low - 1e-12 * high <= rate(epoch) <= high * (1 + 1e-12)


@given(knots(), st.floats(0, 45), st.floats(1e-9, 1e-3))
def test_a_rate_without_jumps_is_continuous(course: list[tuple[float, float]], epoch: float, step: float) -> None:
    rate = PiecewiseLinear([at for at, _ in course], [value for _, value in course])
    steepest = max(abs(b - a) / (y - x) for (x, a), (y, b) in itertools.pairwise(course))
    assert abs(rate(epoch + step) - rate(epoch)) <= steepest * step * (1 + 1e-6) + 1e-9


@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.floats(1e-4, 10),
    st.integers(0, 100).map(lambda percent: percent / 100),
    st.floats(0, 0.999),
)
def test_every_cycle_is_the_first_one_again_and_peaks_once_it_is_warm(
    cycles: int, length: int, peak: float, warm: float, inside: float
) -> None:
    schedule = Schedule(batch_size=1, peak_lr=peak, warmup_epochs=warm * length)
    rate = learning_rate_of(schedule, epochs=cycles * length, cycles=cycles)
    for cycle in range(cycles):
        start = cycle * length
        assert rate(start + inside * length) == pytest.approx(rate(inside * length), rel=1e-9, abs=1e-9 * peak)
        assert rate(start + warm * length) == pytest.approx(peak if warm < 1 else rate(warm * length), rel=1e-9)
        assert 0 <= rate(start + inside * length) <= peak * (1 + 1e-12)
    assert rate(cycles * length) == 0


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(0, 10), st.data())
def test_a_value_by_epoch_holds_from_its_epoch_on(sizes: list[int], first: int, data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.integers(1, 5), min_size=len(sizes), max_size=len(sizes)))
    starts = [0, *itertools.accumulate(gaps)][: len(sizes)]
    given_sizes = by_epoch(tuple(zip(starts, sizes, strict=True)), first_epoch=first)
    for epoch in range(40):
        expected = [size for start, size in zip(starts, sizes, strict=True) if start <= epoch + first][-1]
        assert given_sizes(epoch) == given_sizes(epoch + 0.999) == expected


# --- the order of the data

seeds = st.integers(0, 2**63 - 1)


@given(seeds, st.integers(0, 10**6), st.integers(1, 300))
def test_the_order_of_an_epoch_is_a_permutation_and_a_function_of_seed_and_epoch(
    seed: int, epoch: int, number: int
) -> None:
    def order(seed: int, epoch: int, **more: Any) -> list[int]:
        return draw_epoch(seed=seed, epoch=epoch, num_images=number, image_size=(8, 8), **more).order.tolist()

    once = order(seed, epoch)
    torch.manual_seed(1)
    torch.rand(3)
    assert once == order(seed, epoch) == order(seed, epoch, augment=Augment(padding=2, flip=True, cutout=3))
    assert sorted(once) == list(range(number))
    if number > 20:  # by chance, the same order comes once in more than 10¹⁸
        assert once != order(seed, epoch + 1)
        assert once != order(seed ^ 1, epoch)


@given(seeds, st.integers(1, 6), st.integers(1, 6), st.integers(1, 200))
def test_shards_have_disjoint_shares_that_together_are_the_batch(
    seed: int, num_shards: int, per_shard: int, number: int
) -> None:
    batch_size = num_shards * per_shard
    order = draw_epoch(seed=seed, epoch=0, num_images=number, image_size=(4, 4)).order.tolist()
    steps = steps_per_epoch(number, batch_size)
    seen = []
    for step in range(steps):
        shares = [
            order[batch_share(step, batch_size=batch_size, shard=shard, num_shards=num_shards)]
            for shard in range(num_shards)
        ]
        assert [len(share) for share in shares] == [per_shard] * num_shards
        together = list(itertools.chain(*shares))
        assert together == order[batch_share(step, batch_size=batch_size, shard=0, num_shards=1)]
        seen += together
    assert seen == order[: steps * batch_size]
    assert len(set(seen)) == len(seen) > number - batch_size


@given(seeds, st.integers(0, 50), st.integers(0, 3), st.integers(0, 8))
def test_every_crop_and_cutout_is_inside_the_image(seed: int, epoch: int, padding: int, cutout: int) -> None:
    choices = draw_epoch(
        seed=seed,
        epoch=epoch,
        num_images=50,
        image_size=(8, 10),
        augment=Augment(padding=padding, flip=True, cutout=cutout),
    )
    for places, last in (
        (choices.changes.top, 2 * padding),
        (choices.changes.left, 2 * padding),
        (choices.changes.cut_top, 8 - cutout),
        (choices.changes.cut_left, 10 - cutout),
    ):
        if places is not None:
            assert 0 <= int(places.min()) <= int(places.max()) <= last


# --- params


@cache
def recipe() -> dict[str, Any]:
    tree: dict[str, Any] = YAML(typ="safe", pure=True).load((ROOT / "recipes" / "fashion-mini.yaml").read_text())
    return tree


@st.composite
def valid_trees(draw: st.DrawFn) -> dict[str, Any]:
    """The default recipe with any values that make sense, and without any of what has a default."""
    tree = copy.deepcopy(recipe())
    tree["workers"]["seeds"] = draw(st.lists(seeds, min_size=1, max_size=5, unique=True))
    tree["seed"] = draw(seeds)
    tree["data"] |= {"train_images": draw(st.one_of(st.just("all"), st.integers(1, 10**6))), "root": draw(st.text())}
    tree["augment"] = {
        "padding": draw(st.integers(0, 40)),
        "flip": draw(st.booleans()),
        "cutout": draw(st.integers(0, 9)),
    }
    tree["model"]["options"] = draw(st.dictionaries(st.text(max_size=5), st.integers() | st.lists(st.text(max_size=3))))
    tree["optimizer"]["weight_decay"] = draw(st.floats(0, 1))
    tree["compute"]["precision"] = draw(st.sampled_from(("auto", "fp32", "bf16", "fp16")))
    epochs, cycles = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    tree["phase2"] |= {"epochs": epochs * cycles, "cycles": cycles}
    tree["phase2"]["warmup_epochs"] = draw(st.floats(0, epochs))
    if draw(st.booleans()):
        for key in ("peak_lr", "warmup_epochs"):
            del tree["phase1"][key]
        last = tree["phase1"]["max_epochs"]
        tree["phase1"]["lr_knots"] = [[0, draw(rates)], [draw(st.floats(0, last)), draw(rates)], [last, 0]]
        shards = tree["phase1"]["shards"] = draw(st.integers(1, 8))
        tree["phase1"]["batch_size"] = [[epoch, shards * draw(st.integers(1, 999))] for epoch in (0, 2)]
    if draw(st.booleans()):
        tree["phase2"]["ema_decay"] = draw(st.floats(0.01, 0.999))
    optional = [key for key, default in defaults().items() if default not in (dataclasses.MISSING, None)]
    for key in draw(st.sets(st.sampled_from(optional))):
        node, last = node_of(tree, key)
        node.pop(last, None)
    return tree


def tree_of(value: Any) -> Any:
    """Parsed params as a file holds them."""
    if dataclasses.is_dataclass(value):
        values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: tree_of(item) for name, item in values.items() if item is not None}
    return [tree_of(item) for item in value] if isinstance(value, tuple) else value


@given(valid_trees())
def test_any_valid_tree_is_parsed_to_just_what_it_says_and_to_defaults(tree: dict[str, Any]) -> None:
    before = copy.deepcopy(tree)
    parsed = tree_of(parse_params(tree))
    for key, default in defaults().items():
        node, last = node_of(before, key)
        if default not in (dataclasses.MISSING, None):
            node.setdefault(last, tree_of(default))
    assert parsed == before


@cache
def defaults(kind: Any = Params, prefix: str = "") -> dict[str, Any]:
    """All entries that a file can have, by dotted key."""
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        key = f"{prefix}{field.name}"
        section = hints[field.name]
        found |= defaults(section, f"{key}.") if dataclasses.is_dataclass(section) else {key: field.default}
    return found


def dotted_keys() -> list[str]:
    """All entries of the default recipe that are not sections."""
    return [key for key in defaults() if present(key)]


def node_of(tree: dict[str, Any], dotted: str) -> tuple[dict[str, Any], str]:
    *sections, last = dotted.split(".")
    for section in sections:
        tree = tree[section]
    return tree, last


def present(dotted: str) -> bool:
    try:
        node, last = node_of(recipe(), dotted)
    except KeyError:
        return False
    return last in node


FREE_TEXT = ("recipe", "method", "data.name", "data.root", "model.name")


@pytest.mark.parametrize("dotted", dotted_keys())
def test_any_corruption_of_a_single_entry_is_refused_by_its_dotted_key(dotted: str) -> None:
    wrong = st.one_of(
        st.none(),
        st.just(float("nan")),
        st.just(float("inf")),
        st.integers(max_value=-1),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
        st.lists(st.none(), min_size=1, max_size=2),
        *([] if dotted in FREE_TEXT else [st.text("xyz ", min_size=1, max_size=5)]),
    )

    @settings(max_examples=15)
    @given(wrong)
    def check(value: Any) -> None:
        tree = copy.deepcopy(recipe())
        node, last = node_of(tree, dotted)
        node[last] = value
        with pytest.raises(SwapError) as caught:
            parse_params(tree, file="some.yaml")
        assert str(caught.value).startswith("some.yaml: ")
        assert dotted in str(caught.value)
        assert "\n" not in str(caught.value)

    check()


@pytest.mark.parametrize("dotted", dotted_keys())
def test_a_misspelt_entry_is_refused_by_its_dotted_key(dotted: str) -> None:
    @settings(max_examples=5)
    @given(st.text(max_size=3))
    def check(more: str) -> None:
        tree = copy.deepcopy(recipe())
        node, last = node_of(tree, dotted)
        node[f"{last}x{more}"] = node.pop(last)
        with pytest.raises(SwapError) as caught:
            parse_params(tree)
        assert f"{dotted}x" in str(caught.value).replace(
            f"{dotted.rpartition('.')[0]}.'", f"{dotted.rpartition('.')[0]}."
        )
        assert "\n" not in str(caught.value)

    check()
