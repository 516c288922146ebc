"""`mqd top`: the present activity of a cluster, in the terminal."""

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

from mqd.base.paths import default_data_dir, layout
from mqd.cli.broker_lookup import LATEST, Cluster, Partition
from mqd.cli.cluster_view import address
from mqd.cli.common import DEFAULT_BOOTSTRAP, CliError, Settings, emit_json, is_here, options
from mqd.cli.inspection import live_view, metrics_page, spares
from mqd.cli.inspection.live_view import Committed, Replicas, Sample

EVERY_S = 2.0
_ENTER_SCREEN, _LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def cpu_seconds(pid: int) -> float | None:
    """The CPU time that a process has used, system calls included. None: it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Sampler:
    """Samples a cluster, and the broker of `data_dir`, if given. One connection to each broker is
    kept; after an error they are opened again.
    """

    def __init__(self, bootstrap: str, data_dir: Path | None) -> None:
        self._bootstrap, self._data_dir = bootstrap, data_dir
        self._cluster: Cluster | None = None

    def sample(self) -> Sample:
        """Raises CliError."""
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
        described = cluster.described_topics()
        spares.count_as_in_sync(cluster.first, described)
        partitions = {
            (topic.name, one.partition_index): Replicas(
                one.leader_id, tuple(sorted(set(one.replica_nodes) - set(one.isr_nodes)))
            )
            for topic in described
            for one in topic.partitions
        }
        cpu_s, behind_s = self._local()
        from mqd.cli.group_listing import committed

        found = committed(cluster)
        at_s = time.monotonic()
        ends = cluster.offsets(partitions, LATEST)
        groups = {name: Committed(state, offsets, behind_s.get(name, {})) for name, (state, offsets) in found.items()}
        return Sample(at_s, cluster.addresses(), partitions, ends, groups, cpu_s)

    def _local(self) -> tuple[dict[str, float], dict[str, dict[Partition, float]]]:
        """CPU seconds of this host's processes; lag in seconds, by group and partition."""
        if self._data_dir is None:
            return {}, {}
        from mqd.cli.verbs.status import broker_status

        about = broker_status(self._data_dir)
        cpu_s = {
            one["name"]: used
            for one in about["processes"]
            if one["pid"] and (used := cpu_seconds(one["pid"])) is not None
        }
        behind_s: dict[str, dict[Partition, float]] = {}
        if about.get("metrics_url"):
            with contextlib.suppress(OSError, ValueError):  # the columns stay empty; mqd doctor shows why
                for one in metrics_page.read(about["metrics_url"], self._data_dir):
                    if one.name == "mqd_consumergroup_lag_seconds":
                        of_group = behind_s.setdefault(one.labels["consumergroup"], {})
                        of_group[one.labels["topic"], int(one.labels["partition"])] = one.value
        return cpu_s, behind_s


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Within this context, output uses the whole terminal and keys are read as they are pressed."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    sys.stdout.write(_ENTER_SCREEN)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE_SCREEN)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _draw(lines: list[str]) -> None:
    """Draws the lines; the first one, and those that follow an empty one (titles), in bold."""
    shown = []
    for number, line in enumerate(lines):
        is_title = not number or not lines[number - 1]
        shown.append((_BOLD + line + _PLAIN if is_title else line) + _CLEAR_LINE)
    sys.stdout.write(_HOME + "\n".join(shown) + _CLEAR_BELOW)
    sys.stdout.flush()


def _heading(bootstrap: str, text: str) -> str:
    return f"mqd top of {bootstrap}, {time.strftime('%H:%M:%S')}, {text}"


def _live(sampler: Sampler, bootstrap: str, every_s: float) -> None:
    before: Sample | None = None
    shown: live_view.View | None = None
    with _screen():
        while True:
            trouble = ""
            try:
                sample = sampler.sample()
                shown = live_view.view(before, sample) if before is not None else None
                before = sample
            except CliError as error:
                before, trouble = None, f"no response: {error.format_message()}"
            size = os.get_terminal_size()
            heading = _heading(bootstrap, trouble or f"every {every_s:g} s; q quits")
            if shown is not None:
                _draw(live_view.render(shown, heading, size.lines, size.columns))
            else:
                _draw([live_view.printable(heading)[: size.columns], "waiting for a second sample"])
            if _wait_for_quit(every_s if shown is not None or trouble else min(every_s, 1.0)):
                return


def _wait_for_quit(wait_s: float) -> bool:
    """Whether q was pressed, or the terminal has gone, before the time is over."""
    deadline = time.monotonic() + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"", b"q", b"Q"):
                return True
    return False


def _as_json(shown: live_view.View) -> dict[str, Any]:
    return {
        "seconds": round(shown.seconds, 3),
        "partitions": shown.partition_count,
        "records_in_s": shown.records_in_s,
        "records_committed_s": shown.records_read_s,
        "hosts": [one._asdict() for one in shown.hosts],
        "processes": [one._asdict() for one in shown.processes],
        "topics": [one._asdict() for one in shown.topics],
        "groups": [
            one._asdict() | {"catches_up_s": one.catches_up_s(shown.group_input_s[one.name])} for one in shown.groups
        ],
        "slow": [one._asdict() for one in shown.slow],
    }


@click.command(short_help="Show rates, lag, slow partitions and hosts, live.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Show the CPU of this broker's processes, and lag in seconds, too.  [env: MQD_DATA_DIR]",
)
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0.2, 3600),
    default=EVERY_S,
    show_default=True,
    help="Seconds between two samples.",
)
@click.option("--once", is_flag=True, help="Print once, from two samples, and exit.")
@options
def command(settings: Settings, data_dir: Path | None, every_s: float, once: bool) -> None:
    """Show what a cluster does now: records written and committed a second by topic, lag by group,
    slow partitions, hosts. q quits.

    On a broker's host, --data-dir names its data directory, which adds the CPU of its processes and
    the lag in seconds. Without it and without --bootstrap, the default data directory is used, if it
    exists. Works with any Kafka cluster of version 3.0 or later.
    """
    if data_dir is None and is_here(settings):
        data_dir = default_data_dir()
    bootstrap = settings.bootstrap
    if data_dir is not None:
        from mqd.cli.verbs.status import broker_status

        data_dir = layout(data_dir).data_dir
        about = broker_status(data_dir)
        if bootstrap == DEFAULT_BOOTSTRAP and about["port"]:
            bootstrap = address(about["host"], about["port"])
    is_live = not once and not settings.json
    if is_live and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CliError("not a terminal; --once prints once and exits")
    sampler = Sampler(bootstrap, data_dir)
    try:
        if is_live:
            _live(sampler, bootstrap, every_s)
            return
        before = sampler.sample()
        time.sleep(every_s)
        shown = live_view.view(before, sampler.sample())
    finally:
        sampler.close()
    if settings.json:
        emit_json(_as_json(shown))
    else:
        click.echo("\n".join(live_view.render(shown, _heading(bootstrap, f"over {shown.seconds:.1f} s"))))
