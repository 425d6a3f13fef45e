"""Figures of schedules: rate and batch size by epoch (the paper's Figure 5), SWA's cycles and samples (Figure 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swap_pipeline.config.params import Params, Schedule
from swap_pipeline.config.schedules import PiecewiseLinear, by_epoch, learning_rate_of
from swap_pipeline.report.figures import COLOURS, GREY, Drawing, grid, new_figure, style, whole_epochs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Points = tuple[tuple[float, float], ...]
"""(epoch, value), connected by straight lines."""

_SAMPLES = "models that are averaged"
_LINES: dict[str, dict[str, Any]] = {
    "phase1": {"color": COLOURS["phase1"], "linewidth": 4.0, "linestyle": "-"},
    "phase2": {"color": COLOURS["phase2"], "linewidth": 4.0, "linestyle": "-"},
}


@dataclass(frozen=True, kw_only=True)
class Course:
    """A run's schedules."""

    section: str
    label: str
    rates: Points
    batch_sizes: Points

    @property
    def last_epoch(self) -> float:
        return self.rates[-1][0]

    def later(self, epochs: float) -> Course:
        """The same, starting `epochs` later."""
        rates, batch_sizes = (tuple((epochs + x, y) for x, y in points) for points in (self.rates, self.batch_sizes))
        return replace(self, rates=rates, batch_sizes=batch_sizes)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a method gets models to average: its runs, one after another, and when models are taken."""

    method: str
    title: str
    courses: tuple[Course, ...]
    samples: tuple[float, ...]
    """epochs"""
    models_a_sample: int


def course_of(
    section: str, label: str, given: Schedule, *, epochs: int, cycles: int = 1, first_epoch: int = 0, until: float = 0
) -> Course:
    """From params; `until` is the actual end if it is before the planned one."""
    end = until or epochs
    rate = learning_rate_of(given, epochs=epochs, cycles=cycles, first_epoch=first_epoch)
    sizes = by_epoch(given.batch_size, first_epoch=first_epoch)
    changes = [epoch for epoch in sizes.epochs if 0 < epoch < end]
    batch_sizes = [(0.0, float(sizes(0)))]
    for epoch in changes:
        batch_sizes += [(epoch, batch_sizes[-1][1]), (epoch, float(sizes(epoch)))]
    batch_sizes.append((end, batch_sizes[-1][1]))
    return Course(section=section, label=label, rates=rates_until(rate, end), batch_sizes=tuple(batch_sizes))


def rates_until(rate: PiecewiseLinear, end: float) -> Points:
    """The points from 0 to `end`; if the rate jumps there, the value before the jump."""
    knots = rate.drawn()
    at_end = next((value for epoch, value in knots if epoch == end), rate(end))
    return ((0.0, rate(0)), *(knot for knot in knots if 0 < knot[0] < end), (end, at_end))


def planned_courses(params: Params) -> list[Course]:
    """Both phases; phase 2 starts at phase 1's latest end."""
    phase1 = params.phase1
    label = "phase 1, at most" if phase1.may_end_early else "phase 1"
    return [
        course_of("phase1", label, phase1, epochs=phase1.max_epochs),
        *_worker_courses(params, f"phase 2, W = {len(params.workers.seeds)}", after=phase1.max_epochs),
    ]


def courses_as_run(params: Params, phase1_epochs: int) -> list[Course]:
    """Phase 1 as long as it ran, then a worker."""
    phase1 = params.phase1
    return [
        course_of("phase1", "phase 1", phase1, epochs=phase1.max_epochs, until=phase1_epochs),
        *_worker_courses(params, "phase 2", after=phase1_epochs),
    ]


def _worker_courses(params: Params, label: str, *, after: float) -> list[Course]:
    """A worker's, if there is a phase 2."""
    phase2 = params.phase2
    if phase2.epochs == 0:
        return []
    course = course_of(
        "phase2", label, phase2, epochs=phase2.epochs, cycles=phase2.cycles, first_epoch=phase2.first_epoch
    )
    return [course.later(after)]


def sampling_of(params: Params, *, method: str, title: str) -> Sampling:
    """Models to average are taken at the end of each cycle of phase 2."""
    courses, cycles = planned_courses(params), params.phase2.cycles
    cycle = params.phase2.epochs // cycles
    return Sampling(
        method=method,
        title=title,
        courses=tuple(courses),
        samples=tuple(courses[0].last_epoch + cycle * (k + 1) for k in range(cycles)),
        models_a_sample=len(params.workers.seeds),
    )


def draw_schedules(courses: Sequence[Course]) -> Drawing:
    """Learning rate and batch size; a line shows where phase 2 begins."""
    handover = next(course.last_epoch for course in courses if course.section == "phase1")
    with style():
        figure = new_figure(8, 5.4)
        rates, batches = figure.subplots(2, 1, sharex=True)
        for course in courses:
            line = _LINES[course.section]
            rates.plot(*zip(*course.rates, strict=True), label=course.label, gid=f"rate-{course.section}", **line)
            batches.plot(*zip(*course.batch_sizes, strict=True), gid=f"batch-{course.section}", **line)
        for axes in (rates, batches):
            axes.axvline(handover, color=GREY, linewidth=0.8)
            axes.set_ylim(bottom=0)
        grid(rates, batches)
        rates.set_ylabel("learning rate")
        batches.set_ylabel("batch size")
        batches.set_xlabel("epoch")
        batches.set_xlim(left=0)
        whole_epochs(batches)
        figure.legend(loc="outside lower center", ncols=len(courses))
    return Drawing(
        name="schedules",
        figure=figure,
        alt="Learning rate and batch size by epoch: "
        + "; ".join(f"{course.label}: {_range(course)}, until epoch {course.last_epoch:g}" for course in courses),
        columns=("run", "epoch", "learning_rate", "batch_size"),
        rows=tuple(
            row
            for course in courses
            for row in (
                *((course.section, epoch, rate, None) for epoch, rate in course.rates),
                *((course.section, epoch, None, size) for epoch, size in course.batch_sizes),
            )
        ),
    )


def _range(course: Course) -> str:
    sizes = dict.fromkeys(f"{size:,.0f}" for _, size in course.batch_sizes)
    return f"rate at most {max(rate for _, rate in course.rates):g}, batches of {' then '.join(sizes)}"


def draw_samplings(samplings: Sequence[Sampling]) -> Drawing:
    """One panel each; averaged models are marked on the rate."""
    with style():
        columns = min(2, len(samplings))
        lines = -(-len(samplings) // columns)
        figure = new_figure(8, 0.6 + 2.3 * lines)
        panels = figure.subplots(lines, columns, sharex=True, squeeze=False)
        shown: dict[str, Any] = {}
        for axes, sampling in zip(panels.flat, samplings, strict=False):
            shown |= _draw_sampling(axes, sampling)
        for axes in list(panels.flat)[len(samplings) :]:
            axes.set_visible(False)
        for axes in panels[:, 0]:
            axes.set_ylabel("learning rate")
        for axes in list(panels.flat)[max(0, len(samplings) - columns) : len(samplings)]:
            axes.set_xlabel("epoch")
            axes.tick_params(labelbottom=True)
            whole_epochs(axes)
        panels.flat[0].set_xlim(left=0)
        shown[_SAMPLES] = shown.pop(_SAMPLES)  # last
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3)
    return Drawing(
        name="swa",
        figure=figure,
        alt="Learning rates, with the epochs at which models are sampled: "
        + "; ".join(
            f"{sampling.title}: {len(sampling.samples) * sampling.models_a_sample} models, until epoch "
            f"{sampling.samples[-1]:g}"
            for sampling in samplings
        ),
        columns=("method", "run", "epoch", "learning_rate", "models"),
        rows=tuple(
            row
            for sampling in samplings
            for row in (
                *(
                    (sampling.method, course.section, epoch, rate, None)
                    for course in sampling.courses
                    for epoch, rate in course.rates
                ),
                *((sampling.method, "sample", epoch, None, sampling.models_a_sample) for epoch in sampling.samples),
            )
        ),
    )


def _draw_sampling(axes: Axes, sampling: Sampling) -> dict[str, Any]:
    """Lines in the legend, by label."""
    shown = {}
    for course in sampling.courses:
        line = {**_LINES[course.section], "linewidth": 2.0}
        label = {"phase2": "phase 2, each worker"}.get(course.section, course.label)
        gid = f"{sampling.method}-{course.section}"
        (shown[label],) = axes.plot(*zip(*course.rates, strict=True), gid=gid, **line)
    last = sampling.courses[-1]
    (points,) = axes.plot(
        sampling.samples,
        [_towards(last.rates)(epoch) for epoch in sampling.samples],
        linestyle="none",
        marker="o",
        markersize=5.5,
        markerfacecolor="white",
        markeredgecolor=COLOURS["swap"],
        markeredgewidth=1.6,
        clip_on=False,
        zorder=4,
        gid=f"{sampling.method}-samples",
    )
    shown[_SAMPLES] = points
    if sampling.models_a_sample > 1:
        axes.annotate(
            f"{sampling.models_a_sample} models{' each time' if len(sampling.samples) > 1 else ''}",
            (sampling.samples[-1], 0),
            xytext=(8, 4),
            textcoords="offset points",
            fontsize=9,
            color=COLOURS["swap"],
        )
    axes.set_title(sampling.title)
    axes.set_ylim(bottom=0)
    axes.axvline(sampling.courses[0].last_epoch, color=GREY, linewidth=0.8)
    grid(axes)
    return shown


def _towards(points: Points) -> Callable[[float], float]:
    """The value at an epoch; if it jumps there, the one before the jump."""

    def value(epoch: float) -> float:
        return next(y for x, y in points if abs(x - epoch) < 1e-9)

    return value
