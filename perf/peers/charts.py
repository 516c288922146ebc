"""Charts of the comparison, as PNG below docs/images/. Only this module needs matplotlib (extra
`bench`); without it there are only the tables.

Every chart shows a peer in the same colour and leaves out what was not measured: a missing bar is a
missing figure, never a zero.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from perf.peers import plan
from perf.peers.peer import Load
from perf.peers.plan import BASE, Step
from perf.peers.report import LATENCY_CHART, THROUGHPUT_CHART
from perf.peers.results import Run, is_saturated
from perf.peers.rows import DURABLE

COLOURS = {
    "mqd": "#0b6e4f",
    "Apache Kafka": "#c8553d",
    "NATS JetStream": "#3d7ea6",
    "RabbitMQ streams": "#e09f3e",
    "Redis Streams": "#7b506f",
}
DOTS_PER_INCH = 110


def axis_label(load: Load) -> str:
    """The difference from the base, for an axis."""
    if load == BASE:
        return "1 KiB (base)"
    size = f"{load.record_bytes // 1024} KiB" if load.record_bytes % 1024 == 0 else f"{load.record_bytes} B"
    differing = [
        (load.record_bytes != BASE.record_bytes, size),
        (load.acks != BASE.acks, f"acks={load.acks}"),
        (load.compression != BASE.compression, load.compression),
        (load.partitions != BASE.partitions, f"{load.partitions} part."),
        (load.durable, "fsync"),
    ]
    return " ".join(text for differs, text in differing if differs)


def cpu_per_gb(load: Load) -> float:
    """Turns CPU-seconds per million records of this load into CPU-seconds per GB of payload."""
    return 1e3 / load.record_bytes


def bars(
    run: Run, loads: list[Load], value: str, scale: Callable[[Load], float] = lambda load: 1.0
) -> dict[str, list[float | None]]:
    """For each peer its figure at each load, times the load's scale; None where there is none."""
    found = {}
    for facts in run.measured():
        medians = [run.value(facts.name, Step(plan.THROUGHPUT, load), value) for load in loads]
        if any(medians):
            found[facts.name] = [
                None if median is None else median["median"] * scale(load)
                for load, median in zip(loads, medians, strict=True)
            ]
    return found


def latency_points(run: Run, load: Load, value: str) -> dict[str, list[tuple[float, float, bool]]]:
    """For each peer (thousand records/s, milliseconds, whether the rate was sustained) at the fixed rates."""
    found = {}
    for facts in run.measured():
        points = []
        for rate in plan.RATES:
            medians = run.medians(facts.name, Step(plan.LATENCY, load, rate=rate))
            if value in medians:
                points.append((medians["rate"] / 1e3, medians[value] / 1e3, not is_saturated(medians, value)))
        if points:
            found[facts.name] = points
    return found


def _bar_chart(axes: Any, loads: list[Load], groups: dict[str, list[float | None]], title: str) -> None:
    width = 0.8 / max(len(groups), 1)
    for index, (name, values) in enumerate(groups.items()):
        places = [
            place + (index - (len(groups) - 1) / 2) * width for place, found in enumerate(values) if found is not None
        ]
        axes.bar(places, [found for found in values if found is not None], width, label=name, color=COLOURS.get(name))
    axes.set_xticks(range(len(loads)), [axis_label(load) for load in loads], rotation=35, ha="right")
    axes.set_title(title, fontsize=10, loc="left")


def _latency_chart(axes: Any, run: Run, load: Load, value: str, title: str) -> None:
    for name, points in latency_points(run, load, value).items():
        axes.plot(
            [point[0] for point in points],
            [point[1] for point in points],
            color=COLOURS.get(name),
            label=name,
            linewidth=1.2,
        )
        for rate, milliseconds, kept in points:
            axes.plot(rate, milliseconds, "o" if kept else "x", color=COLOURS.get(name), markersize=5)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda milliseconds, _: f"{milliseconds:g}")
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("thousand records/s", fontsize=9)
    axes.set_ylabel("ms")
    axes.set_title(title, fontsize=10, loc="left")


def _finish(figure: Any, axes: Any, path: Path) -> None:
    for one in axes:
        one.grid(axis="y", alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    handles = {label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="upper right", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})


def draw(run: Run, directory: Path) -> list[str]:
    """Draws the charts. Returns their names. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    drawn = [THROUGHPUT_CHART]
    loads = run.loads(plan.THROUGHPUT, plan.NEUTRAL)
    figure, axes = pyplot.subplots(3, 1, figsize=(9, 9.5))
    _bar_chart(axes[0], loads, bars(run, loads, "mb_per_s"), "Produced, MB/s of payload (more is better)")
    _bar_chart(axes[1], loads, bars(run, loads, "consume_mb_per_s"), "Read back, MB/s of payload (more is better)")
    cpu = bars(run, loads, "broker_cpu_s_per_million", cpu_per_gb)
    _bar_chart(axes[2], loads, cpu, "Broker CPU-seconds per GB of payload produced, logarithmic (less is better)")
    axes[2].set_yscale("log")
    axes[2].yaxis.set_major_formatter(lambda seconds, _: f"{seconds:g}")
    _finish(figure, list(axes), directory / THROUGHPUT_CHART)
    pyplot.close(figure)
    if run.loads(plan.LATENCY, plan.NEUTRAL):
        figure, grid = pyplot.subplots(2, 2, figsize=(9, 6.5))
        for row, (load, label) in enumerate(((BASE, "no fsync"), (DURABLE, "fsync first"))):
            _latency_chart(grid[row][0], run, load, "acknowledged_p99_us", f"Acknowledged, p99, {label}")
            _latency_chart(grid[row][1], run, load, "consumed_p99_us", f"Produced to read, p99, {label}")
        _finish(figure, [*grid[0], *grid[1]], directory / LATENCY_CHART)
        pyplot.close(figure)
        drawn.append(LATENCY_CHART)
    return drawn
