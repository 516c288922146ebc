"""Metrics in Prometheus' text format on an admin port of the loopback address.

The page is rendered in a thread of its own (mqd/acceptor/metrics/server.py). That thread reads the
control segment (through its own view) and copies of the loop's state; it and the event loop never
wait for each other. Results for directories are cached for SIZES_CACHE_S; for a directory that
hangs, the last result is shown (mqd/acceptor/metrics/directories.py).
"""

import os
import threading
import time
from collections import ChainMap
from collections import Counter as Tally
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from mqd import native
from mqd.acceptor.broker_state import OWNER_NONE
from mqd.acceptor.handlers.cluster.describe_log_dirs import size_of
from mqd.acceptor.metrics import cluster as cluster_metrics
from mqd.acceptor.metrics import groups as group_metrics
from mqd.acceptor.metrics import partitions as partition_metrics
from mqd.acceptor.metrics import schedules as schedule_metrics
from mqd.acceptor.metrics.directories import CachedQuery
from mqd.acceptor.metrics.observer import HANDLER_BUCKETS, Observer
from mqd.acceptor.metrics.topics import TopicTraffic
from mqd.acceptor.metrics.waiting import WaitingTimes
from mqd.base import restarts, schedule_files
from mqd.log import compaction_report, damage

SIZES_CACHE_S = 10.0
WAITING_CACHE_S = 1.0

_HELP = {
    "LOOPS": "Turns (iterations) of the worker's event loop",
    "BYTES_IN": "Bytes received from clients",
    "BYTES_OUT": "Bytes sent to clients",
    "REQUESTS_PRODUCE": "Produce requests",
    "REQUESTS_FETCH": "Fetch requests",
    "REQUESTS_LIST_OFFSETS": "ListOffsets requests answered by the worker",
    "REQUESTS_CACHED": "Requests answered from the worker's cache",
    "REQUESTS_FORWARDED_CONTROL": "Requests passed to the acceptor",
    "BATCHES_APPENDED": "Record batches appended",
    "RECORDS_APPENDED": "Records appended",
    "BYTES_APPENDED": "Bytes appended to logs",
    "BATCHES_FORWARDED": "Record batches passed to the worker that owns the partition",
    "BATCHES_REFUSED": "Record batches refused",
    "DUPLICATES": "Record batches that an idempotent producer sent again",
    "RECORDS_DEDUPLICATED": "Records that were not written because others have their ids (dedup.window.ms)",
    "FETCH_BYTES": "Record bytes sent to consumers",
    "FETCH_SENDFILE_BYTES": "Record bytes sent to consumers without copying",
    "FETCH_PARKED": "Fetch requests that waited for records",
    "FETCH_COLD": "Fetch requests for bytes outside the page cache",
    "SYNCS": "Flushes to disk",
    "SYNC_FAILURES": "Flushes that failed",
    "ROLLS": "Segments started",
    "CONNECTIONS_ACCEPTED": "Connections accepted",
    "CONNECTIONS_CLOSED": "Connections closed",
    "CONNECTIONS_REFUSED": "Connections refused (max.connections)",
    "PROTOCOL_ERRORS": "Connections closed because of a malformed request",
    "ARENA_STALLS": "Number of times that a receive had to wait for arena space",
    "LINK_STALLS": "Number of times that a send to another process had to wait for ring space",
    "THROTTLED": "Number of times that a connection was left unread because its client was over a quota",
    "LOCAL_ATTACHES": "Local clients attached through shared memory",
    "LOCAL_REFUSED": "Local clients refused (local.attachments.max, local.memory.max.bytes, max.connections)",
    "LOCAL_REQUESTS": "Requests that came through shared memory",
    "LOCAL_LOOKUPS": "Lookups of file positions by local clients",
    "REPLICA_BYTES": "Bytes appended as a follower",
    "RELAYED_BATCHES": "Record batches of local clients forwarded to leaders on other hosts",
    "RELAYED_BYTES": "Bytes of the requests that forwarded record batches of local clients",
    "RELAY_FAILURES": (
        "Record batches of local clients whose leader on another host could not be reached, or did not answer; they"
        " are retried"
    ),
    "BATCHES_REDIRECTED": "Record batches for retired partitions, redirected to the partitions that take their records",
    "IN_SYNC_SHRINKS": "Replicas that left the in-sync set of a partition led here",
    "IN_SYNC_EXPANDS": "Replicas that joined the in-sync set of a partition led here",
    "LOCAL_ATTACHMENTS": "Local clients attached now",
    "LOCAL_BYTES": "Shared memory of local clients",
    "ARENA_EXTENTS_USED": "Extents of the receive arena in use",
    "ARENA_EXTENTS_TOTAL": "Extents of the receive arena",
    "HEAP_BYTES": "Memory kept for requests and connections",
    "LARGE_REQUEST_BYTES": "Memory set aside for large requests (large.request.memory.bytes)",
    "LARGE_STALLS": "Large requests that waited because the memory for large requests was in use",
    "SESSIONS": "Incremental fetch sessions",
    "SHARE_SESSIONS": "Sessions of members of share groups",
    "PRODUCERS": "Idempotent producers known",
    "VIEW_FILTERED_BYTES": "Bytes of base topics that were read and filtered for readers of views",
    "VIEW_CACHE_HITS": (
        "Pieces of base topics (1 MiB) that were not read again, because their filtered records were cached"
    ),
    "VIEW_CACHE_EVICTIONS": "Pieces whose filtered records were evicted from the cache (64 MiB per worker)",
    "VIEW_CACHE_BYTES": "Filtered records cached for the next readers of views (at most 64 MiB per worker)",
}
_TIMES = {
    "PRODUCE": "From a Produce request's arrival to its response",
    "FETCH": "From a Fetch request's arrival to its response, including the wait for records",
    "LOOP": "One turn of the worker's event loop: how long everything else on this worker waits",
    "SYNC": "One flush to disk",
    "CONTROL": "From the arrival of a request for the acceptor to its response",
}
# measured with worker.loop.profile; each counts only the turns in which it occurred
_LOOP_CAUSES = {
    "LOOP_WRITE": "Writing to segments within one turn of the worker's event loop",
    "LOOP_ALLOCATION": (
        "Writing beyond the reserved space, rolling segments and releasing reserved space within one turn"
    ),
    "LOOP_FLUSH": "Starting flushes within one turn",
    "LOOP_OTHER": "Blocked for other reasons within one turn, such as locks or reading the log's files",
    "LOOP_FAULT": "Blocked within a turn that had a major page fault (a page was read from a disk)",
    "LOOP_SCHEDULING": "Waiting for a CPU before and within one turn",
}
_POWERS = 32


class _DirectoryUsage(NamedTuple):
    """`sizes`: bytes, by topic and partition. `file_system` None: the directory is unusable."""

    sizes: dict[tuple[str, int], int]
    file_system: os.statvfs_result | None = None


class _Reports(NamedTuple):
    """The reports of other processes in the run directory. `damage`: pairs of a worker's
    index and a damaged segment. `compaction`: one report per worker. `restart_counts`: None if the
    broker runs under a supervisor other than that of `mqd up`.
    """

    damage: list[tuple[int, damage.Damage]]
    compaction: list[compaction_report.Report]
    restart_counts: restarts.Restarts | None
    schedules: list[schedule_files.PartitionStatus]


def histogram_buckets(counts: Any) -> tuple[list[tuple[str, float]], float]:
    """Converts 128 buckets, four per power of two of microseconds, to cumulative buckets, one per power
    of two, with bounds in seconds. Returns them and the sum of the times; the sum is accurate to
    12.5 %, because each request counts as the middle of its bucket.
    """
    cumulative, total, sum_us = [], 0, 0.0
    for power in range(_POWERS):
        for quarter in range(4):
            count = int(counts[4 * power + quarter])
            total += count
            width = 2**power / 4
            sum_us += count * (2**power + (quarter + 0.5) * width)
        cumulative.append((repr(2 ** (power + 1) / 1e6), total))
    return [*cumulative, ("+Inf", total)], sum_us / 1e6


class Metrics:
    """Collects the metrics of a scrape, in the thread that renders the page."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._broker = observer.broker
        self._control = observer.control
        self._worker_count = observer.worker_count
        self._run_dir = observer.run_dir
        self._shows_partitions = observer.shows_partitions
        self._profiles_loop = self._broker.config.get("worker.loop.profile") == "true"
        self._registry = CollectorRegistry(auto_describe=False)
        self._directories = [
            CachedQuery(partial(self._measure, index), SIZES_CACHE_S) for index in range(len(self._broker.log_dirs))
        ]
        self._waiting = [
            CachedQuery(WaitingTimes(self._broker, index).measure, WAITING_CACHE_S)
            for index in range(len(self._broker.log_dirs))
        ]
        self._reports = CachedQuery(self._read_reports, 0.0)
        self._topics = TopicTraffic()
        self._lock = threading.Lock()  # one scrape at a time
        self._registry.register(self)

    def render(self) -> bytes:
        with self._lock:
            page = generate_latest(self._registry)
            page += self._topics.text(self._broker, self._control.slot_traffic).encode()
            return page + self._partitions().encode() if self._shows_partitions else page

    # -- a scrape ----------------------------------------------------------------------------------

    def collect(self) -> Iterator[Any]:
        queries: list[CachedQuery[Any]] = [*self._directories, *self._waiting, self._reports]
        for query in queries:
            query.refresh()  # all at the same time, so that a hanging query delays none of the others
        yield from self._requests()
        yield from self._workers()
        yield from self._disks()
        yield from self._compaction()
        reports = self._reports.wait_for_result()
        yield from schedule_metrics.collect(reports.schedules if reports is not None else ())
        waiting = [result for query in self._waiting if (result := query.wait_for_result()) is not None]
        yield from group_metrics.collect(self._broker, ChainMap(*waiting))
        yield from cluster_metrics.collect(self._broker.metadata, self._broker.node_id)
        used, total = self._observer.arena_extents()
        yield GaugeMetricFamily(
            "mqd_acceptor_arena_extents_used", "Extents of the acceptor's arena that hold responses", value=used
        )
        yield GaugeMetricFamily("mqd_acceptor_arena_extents_max", "Extents of the acceptor's arena", value=total)
        yield GaugeMetricFamily(
            "mqd_metadata_version",
            "Version of the metadata that the acceptor serves",
            value=self._broker.metadata.version,
        )

        yield GaugeMetricFamily(
            "mqd_clock_timestamp_seconds", "This host's clock when the page was rendered", value=time.time()
        )
        yield self._deaths()
        yield self._restarts()
        yield self._authentications()
        yield self._certificates()

    def describe(self) -> list[Any]:
        return []

    def _requests(self) -> Iterator[Any]:
        times = HistogramMetricFamily(
            "mqd_handler_seconds", "Time the acceptor took for a request, including waits", labels=["api"]
        )
        failed = CounterMetricFamily(
            "mqd_handler_failures", "Requests after which the connection was closed", labels=["api"]
        )
        for api, stats in list(self._observer.requests.items()):
            bounds = [*map(repr, HANDLER_BUCKETS), "+Inf"]
            times.add_metric([api], list(zip(bounds, accumulate(stats.counts))), stats.seconds)
            if stats.failed_count:
                failed.add_metric([api], stats.failed_count)
        yield from (times, failed)

    def _deaths(self) -> CounterMetricFamily:
        deaths = CounterMetricFamily(
            "mqd_process_deaths", "Number of times that a process of this broker has died", labels=["process"]
        )
        names = [*(f"worker-{worker}" for worker in range(self._worker_count)), "acceptor", "controller"]
        for endpoint, name in enumerate(names):
            deaths.add_metric([name], self._control.endpoint_generation(endpoint))
        return deaths

    def _restarts(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "mqd_process_restarts",
            "Number of times that a process of this broker was restarted, by the reason for its end: "
            + ", ".join(f"{name} ({text})" for name, text in restarts.REASONS.items()),
            labels=["process", "reason"],
        )
        reports = self._reports.wait_for_result()
        counts = reports.restart_counts if reports is not None else None
        if counts is not None:
            names = [*(f"worker-{worker}" for worker in range(self._worker_count)), "acceptor", "controller"]
            for name in names:
                for reason in restarts.REASONS:
                    family.add_metric([name, reason], counts.get(f"mqd-{name}", {}).get(reason, 0))
        return family

    def _authentications(self) -> CounterMetricFamily:
        family = CounterMetricFamily("mqd_authentications", "Authentications of clients, by result", labels=["result"])
        family.add_metric(["succeeded"], self._broker.authentication.succeeded_count)
        family.add_metric(["failed"], self._broker.authentication.failed_count)
        return family

    def _certificates(self) -> GaugeMetricFamily:
        expiries = GaugeMetricFamily(
            "mqd_certificate_expiry_timestamp_seconds",
            "When the certificate of a listener, or the one used between hosts, expires: seconds since 1970",
            labels=["listener"],
        )
        for name, expiry_s in self._observer.certificate_expiries_s().items():
            expiries.add_metric([name], expiry_s)
        return expiries

    def _workers(self) -> Iterator[Any]:
        families: dict[str, Any] = {}
        times = {
            name: HistogramMetricFamily(f"mqd_{name.lower()}_seconds", text, labels=["worker"])
            for name, text in (_TIMES | (_LOOP_CAUSES if self._profiles_loop else {})).items()
        }
        connections = GaugeMetricFamily("mqd_connections", "Open connections", labels=["worker"])
        running = GaugeMetricFamily("mqd_worker_running", "1 while the worker serves", labels=["worker"])
        oldest = GaugeMetricFamily(
            "mqd_sync_oldest_seconds", "How long the oldest flush under way has lasted; 0: none", labels=["worker"]
        )
        for worker in range(self._worker_count):
            label = [str(worker)]
            counters, histograms = self._control.stats(worker)
            connections.add_metric(label, self._control.connection_count(worker))
            running.add_metric(label, self._control.endpoint_state(worker) == native.ProcessState.RUNNING)
            oldest.add_metric(label, self._flush_age_s(worker, int(counters[native.Counter.GAUGE_SYNC_OLDEST_NS])))
            for member in native.Counter:
                if member is native.Counter.GAUGE_SYNC_OLDEST_NS:
                    continue
                kind, _, name = member.name.partition("_")
                family = families.get(name)
                if family is None:
                    family_class = CounterMetricFamily if kind == "COUNT" else GaugeMetricFamily
                    # in Prometheus only a counter's name ends in _total
                    metric_name = name.lower().replace("_total", "_max")
                    family = families[name] = family_class(
                        f"mqd_{metric_name}", _HELP.get(name, name.lower().replace("_", " ")), labels=["worker"]
                    )
                family.add_metric(label, int(counters[member]))
            for time_kind in native.Histogram:
                if time_kind.name in times:
                    buckets, total = histogram_buckets(histograms[time_kind])
                    times[time_kind.name].add_metric(label, buckets, total)
        yield from (connections, running, oldest, *families.values(), *times.values())

    def _flush_age_s(self, worker: int, began_ns: int) -> float:
        """The age of the oldest flush under way; it grows even while the worker itself hangs on the
        disk. 0 if the worker has ended: its last value is out of date.
        """
        if not began_ns or self._control.endpoint_state(worker) != native.ProcessState.RUNNING:
            return 0.0
        return max(0.0, (time.monotonic_ns() - began_ns) / 1e9)

    def _partitions(self) -> str:
        measured = [query.wait_for_result() for query in self._directories]
        reports = self._reports.wait_for_result()
        damaged = Tally(
            (worker, segment.topic_id, segment.partition)
            for worker, segment in (reports.damage if reports is not None else ())
        )
        sizes = [None if directory is None else directory.sizes for directory in measured]
        return partition_metrics.text(self._broker, self._control.slot_view, sizes, damaged)

    def _measure(self, log_dir: int) -> "_DirectoryUsage":
        """Measures one log directory. Blocks until it responds."""
        sizes = {}
        for topic in self._broker.metadata.topics_with_logs():
            for partition in topic.partitions:
                if partition.owner != OWNER_NONE and partition.log_dir == log_dir:
                    try:
                        sizes[topic.name, partition.index] = size_of(self._broker.path_of(topic.name, partition))
                    except OSError:
                        continue  # the directory is offline; mqd_partition_online shows that
        try:
            return _DirectoryUsage(sizes, os.statvfs(self._broker.log_dirs[log_dir]))
        except OSError:
            return _DirectoryUsage(sizes)

    def _read_reports(self) -> "_Reports":
        workers = range(self._worker_count)
        return _Reports(
            [(worker, damaged_segment) for worker in workers for damaged_segment in damage.read(self._run_dir, worker)],
            [compaction_report.read(self._run_dir, worker) for worker in workers],
            restarts.read(self._run_dir),
            schedule_files.read_status(self._run_dir),
        )

    def _compaction(self) -> Iterator[Any]:
        sums = {
            "runs": "Successful compactions of a partition",
            "failures": "Compactions that failed or found unreadable data",
            "read_bytes": "Bytes read by compaction",
            "written_bytes": "Bytes written by compaction",
            "records_read": "Records read by compaction",
            "records_kept": "Records that compaction kept",
            "seconds": "Time spent in compaction, throttling included",
        }
        families = {
            name: CounterMetricFamily(f"mqd_compaction_{name}", text, labels=["worker"]) for name, text in sums.items()
        }
        labels = ["topic", "partition"]
        dirty = GaugeMetricFamily(
            "mqd_compaction_dirty_ratio", "Dirty share of a compacted partition at the last check", labels=labels
        )
        uncleanable = GaugeMetricFamily(
            "mqd_compaction_uncleanable",
            "1: the partition cannot be compacted; the worker's log says why",
            labels=labels,
        )
        reports = self._reports.wait_for_result()
        for worker, report in enumerate(reports.compaction if reports is not None else ()):
            for name, family in families.items():
                family.add_metric([str(worker)], getattr(report, name))
            for partition in report.partitions:
                dirty.add_metric([partition.topic, str(partition.partition)], partition.dirty_ratio)
                uncleanable.add_metric([partition.topic, str(partition.partition)], bool(partition.uncleanable))
        yield from (*families.values(), dirty, uncleanable)

    def _disks(self) -> Iterator[Any]:
        free = GaugeMetricFamily("mqd_log_dir_free_bytes", "Bytes that the broker may still use", labels=["directory"])
        total = GaugeMetricFamily("mqd_log_dir_total_bytes", "Size of the file system", labels=["directory"])
        for path, directory in zip(self._broker.log_dirs, self._directories, strict=True):
            measured = directory.wait_for_result()
            space = measured.file_system if measured is not None else None
            if space is None:
                continue
            free.add_metric([str(path)], space.f_bavail * space.f_frsize)
            total.add_metric([str(path)], space.f_blocks * space.f_frsize)
        yield from (free, total)
