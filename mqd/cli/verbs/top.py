"""`mqd top`: the current activity of a cluster, in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mqd.base.cluster_config import format_address
from mqd.base.paths import default_data_dir, layout
from mqd.cli.broker_lookup import LATEST, Cluster, Partition
from mqd.cli.common import DEFAULT_BOOTSTRAP, CliError, Settings, covers_local_broker, emit_json, options
from mqd.cli.inspection import live_view, metrics_page, spares
from mqd.cli.inspection.live_view import GroupOffsets, Replicas, Sample

INTERVAL_S = 2.0
_ENTER_SCREEN, _LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def cpu_seconds(pid: int) -> float | None:
    """The CPU time that a process has used, including system calls. None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the process name before it may contain any character
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Sampler:
    """Samples a cluster and, if `data_dir` is given, also the broker with that data directory. Keeps
    one connection to each broker; after an error, opens the connections again.
    """

    def __init__(self, bootstrap: str, data_dir: Path | None) -> None:
        self._bootstrap, self._data_dir = bootstrap, data_dir
        self._cluster: Cluster | None = None

    def sample(self) -> Sample:
        """Raises CliError; the next call then connects again."""
        try:
            return self._sample()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.__exit__()
            self._cluster = None

    def _sample(self) -> Sample:
        if self._cluster is None:
            self._cluster = Cluster(self._bootstrap).__enter__()
        cluster = self._cluster
        topics = cluster.describe_topics()
        spares.count_as_in_sync(cluster.bootstrap_broker, topics)
        partitions = {
            (topic.name, partition.partition_index): Replicas(
                partition.leader_id, tuple(sorted(set(partition.replica_nodes) - set(partition.isr_nodes)))
            )
            for topic in topics
            for partition in topic.partitions
        }
        cpu_s, lag_s = self._local_figures()
        from mqd.cli.group_listing import offsets_of_all_groups

        committed_offsets = offsets_of_all_groups(cluster)
        sampled_at_s = time.monotonic()
        end_offsets = cluster.offsets(partitions, LATEST)
        groups = {
            name: GroupOffsets(state, offsets, lag_s.get(name, {}))
            for name, (state, offsets) in committed_offsets.items()
        }
        return Sample(sampled_at_s, cluster.addresses(), partitions, end_offsets, groups, cpu_s)

    def _local_figures(self) -> tuple[dict[str, float], dict[str, dict[Partition, float]]]:
        """Returns (process name -> CPU seconds, group -> partition -> lag in seconds) of this host."""
        if self._data_dir is None:
            return {}, {}
        from mqd.cli.verbs.status import broker_status

        status = broker_status(self._data_dir)
        cpu_s = {
            process["name"]: used
            for process in status["processes"]
            if process["pid"] and (used := cpu_seconds(process["pid"])) is not None
        }
        lag_s: dict[str, dict[Partition, float]] = {}
        if status.get("metrics_url"):
            with contextlib.suppress(OSError, ValueError):  # the columns stay empty; mqd doctor shows why
                for metric in metrics_page.read(status["metrics_url"], self._data_dir):
                    if metric.name == "mqd_consumergroup_lag_seconds":
                        group_lag_s = lag_s.setdefault(metric.labels["consumergroup"], {})
                        group_lag_s[metric.labels["topic"], int(metric.labels["partition"])] = metric.value
        return cpu_s, lag_s


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Within this context, output uses the whole terminal and keys are read as they are pressed."""
    saved_settings = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    sys.stdout.write(_ENTER_SCREEN)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE_SCREEN)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved_settings)


def _draw(lines: list[str]) -> None:
    """Draws the lines. Titles are bold: the first line, and each line after an empty line."""
    styled_lines = []
    for number, line in enumerate(lines):
        is_title = not number or not lines[number - 1]
        styled_lines.append((_BOLD + line + _PLAIN if is_title else line) + _CLEAR_LINE)
    sys.stdout.write(_HOME + "\n".join(styled_lines) + _CLEAR_BELOW)
    sys.stdout.flush()


def _heading(bootstrap: str, text: str) -> str:
    return f"mqd top of {bootstrap}, {time.strftime('%H:%M:%S')}, {text}"


def _run_live(sampler: Sampler, bootstrap: str, interval_s: float) -> None:
    previous: Sample | None = None
    current_view: live_view.View | None = None
    with _screen():
        while True:
            error_text = ""
            try:
                sample = sampler.sample()
                current_view = live_view.view(previous, sample) if previous is not None else None
                previous = sample
            except CliError as error:
                previous, error_text = None, f"no response: {error.format_message()}"
            size = os.get_terminal_size()
            heading = _heading(bootstrap, error_text or f"every {interval_s:g} s; q quits")
            if current_view is not None:
                _draw(live_view.render(current_view, heading, size.lines, size.columns))
            else:
                _draw([live_view.printable(heading)[: size.columns], "waiting for a second sample"])
            if _wait_for_quit(interval_s if current_view is not None or error_text else min(interval_s, 1.0)):
                return


def _wait_for_quit(wait_s: float) -> bool:
    """Waits up to `wait_s`. Returns whether q was pressed or the terminal was closed."""
    deadline = time.monotonic() + wait_s
    while (remaining_s := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], remaining_s)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"", b"q", b"Q"):
                return True
    return False


def _as_json(view: live_view.View) -> dict[str, Any]:
    return {
        "seconds": round(view.seconds, 3),
        "partitions": view.partition_count,
        "records_in_s": view.records_in_s,
        "records_read_s": view.records_read_s,
        "hosts": [host._asdict() for host in view.hosts],
        "processes": [process._asdict() for process in view.processes],
        "topics": [topic._asdict() for topic in view.topics],
        "groups": [
            group._asdict() | {"catch_up_time_s": group.catch_up_time_s(view.group_records_in_s[group.name])}
            for group in view.groups
        ],
        "slow": [partition._asdict() for partition in view.slow],
    }


@click.command(short_help="Show rates, lag, slow partitions and hosts, live.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Also show the CPU usage of this broker's processes, and lag in seconds.  [env: MQD_DATA_DIR]",
)
@click.option(
    "--every",
    "interval_s",
    type=click.FloatRange(0.2, 3600),
    default=INTERVAL_S,
    show_default=True,
    help="Seconds between two samples.",
)
@click.option("--once", is_flag=True, help="Print once, from two samples, and exit.")
@options
def command(settings: Settings, data_dir: Path | None, interval_s: float, once: bool) -> None:
    """Show the current activity of a cluster: records written and committed per second by topic,
    lag by group, slow partitions, hosts. q quits.

    On a broker's host, --data-dir with the broker's data directory adds the CPU usage of its
    processes, and the lag in seconds. Without --data-dir and --bootstrap, the default data directory
    is used if it exists. Works with any Kafka cluster of version 3.0 or later.
    """
    if data_dir is None and covers_local_broker(settings):
        data_dir = default_data_dir()
    bootstrap = settings.bootstrap
    if data_dir is not None:
        from mqd.cli.verbs.status import broker_status

        data_dir = layout(data_dir).data_dir
        status = broker_status(data_dir)
        if bootstrap == DEFAULT_BOOTSTRAP and status["port"]:
            bootstrap = format_address(status["host"], status["port"])
    is_live = not once and not settings.json
    if is_live and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CliError("not a terminal; --once prints once and exits")
    sampler = Sampler(bootstrap, data_dir)
    try:
        if is_live:
            _run_live(sampler, bootstrap, interval_s)
            return
        previous = sampler.sample()
        time.sleep(interval_s)
        current_view = live_view.view(previous, sampler.sample())
    finally:
        sampler.close()
    if settings.json:
        emit_json(_as_json(current_view))
    else:
        click.echo("\n".join(live_view.render(current_view, _heading(bootstrap, f"over {current_view.seconds:.1f} s"))))
