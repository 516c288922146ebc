"""`make bench-peers`, or `python -m perf peers`: compares mqd with its peers: the same load on this machine,
unattended; then mqd and Apache Kafka as clusters of three brokers.

    python -m perf peers                 the base point and one factor varied at a time, five
                                         rounds, 70 minutes at most; appends to perf/history.jsonl,
                                         fills the pages, draws the charts
    python -m perf peers --full          every combination instead of the star (hours: give --minutes)
    python -m perf peers --quick         to try the program, not to compare: short measurements, one
                                         round, nothing is recorded
    python -m perf peers --only mqd --only kafka
    python -m perf peers --prepare       only downloads what the peers need (jars, packages), and
                                         reports what cannot be obtained
    python -m perf peers --pages         only fills the pages and draws the charts from the last
                                         comparison in perf/history.jsonl
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from perf import loading
from perf.accounting import machine, wait_until_idle
from perf.peers import charts, plan, report, results, rows, targets
from perf.peers.apache_kafka import ApacheKafka
from perf.peers.driving import BUILD, Driver, EncodedFrames, KafkaTools, Librdkafka, LoadFailed
from perf.peers.measuring import Bounds, Laboratory
from perf.peers.mqd_broker import Mqd
from perf.peers.nats_jetstream import NatsJetStream
from perf.peers.peer import Peer, Unavailable
from perf.peers.rabbitmq_streams import RabbitmqStreams
from perf.peers.redis_streams import RedisStreams
from perf.peers.report import BUSY_MAX
from perf.peers.results import PeerFacts, Run
from perf.peers.stream_peer import StreamLoad, StreamPeer
from perf.peers.three_brokers import KafkaCluster, MqdCluster
from perf.report import replace_block
from perf.revision import commit

HISTORY = loading.ROOT / "perf" / "history.jsonl"
README = loading.ROOT / "README.md"
PAGE = loading.ROOT / "docs" / "performance.md"
IMAGES = loading.ROOT / "docs" / "images"
PEERS: dict[str, type[Peer]] = {
    "mqd": Mqd,
    "kafka": ApacheKafka,
    "nats": NatsJetStream,
    "rabbitmq": RabbitmqStreams,
    "redis": RedisStreams,
    "mqd-cluster": MqdCluster,
    "kafka-cluster": KafkaCluster,
}
CLUSTERS_SHARE = 0.2  # of the time


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of short measurements; nothing is recorded unless --record"
    )
    parser.add_argument(
        "--full", action="store_true", help="every combination of sizes, acks, codecs, partitions and fsync"
    )
    parser.add_argument(
        "--only", action="append", choices=PEERS, metavar="PEER", help=f"measure these peers only: {', '.join(PEERS)}"
    )
    parser.add_argument(
        "--minutes", type=float, help="time bound of the whole run (default 70; 10 with --quick; 300 with --full)"
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds at most (default 5; 1 with --quick); as many as the time allows"
    )
    parser.add_argument(
        "--heap", default="1G", help="heap of Java peers (default 1G, that of Kafka's own start script)"
    )
    parser.add_argument(
        "--record",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="append to perf/history.jsonl and fill the pages (the default unless --quick or --only)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="where the peers keep their data while they are measured (default: .build/perf, or MQD_PERF_DIR); 40 GB",
    )
    parser.add_argument("--prepare", action="store_true", help="only get what the peers need")
    parser.add_argument("--pages", action="store_true", help="only fill the pages from the last comparison")
    arguments = parser.parse_args(words)
    arguments.minutes = arguments.minutes or (10 if arguments.quick else 300 if arguments.full else 70)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 5)
    if arguments.record is None:
        arguments.record = not arguments.quick and not arguments.only
    return arguments


def _prepare(directory: Path, names: list[str], heap: str) -> tuple[list[Peer], list[PeerFacts]]:
    """The available peers, and the unavailable ones with the reason."""
    available: list[Peer] = []
    skipped: list[PeerFacts] = []
    for name in names:
        peer = PEERS[name](directory / name, heap)
        try:
            peer.prepare()
            available.append(peer)
        except (Unavailable, OSError) as error:
            _log(f"{peer.name}: not measured: {error}")
            skipped.append(PeerFacts(peer.name, skipped=str(error)))
    return available, skipped


def _drivers(peers: list[Peer]) -> tuple[dict[str, Driver], Driver | None, dict[str, Driver]]:
    """The neutral driver of each protocol that is needed; Kafka's tools if they are available; the
    lean drivers.
    """
    streams: dict[str, Driver] = {peer.protocol: StreamLoad() for peer in peers if isinstance(peer, StreamPeer)}
    neutral, lean = dict(streams), dict(streams)
    if any(peer.protocol == "kafka" for peer in peers):
        neutral["kafka"], lean["kafka"] = Librdkafka(), EncodedFrames()
    try:
        return neutral, KafkaTools(), lean
    except Unavailable as error:
        _log(f"Apache Kafka's own tools are not used: {error}")
        return neutral, None, lean


def fill_pages(run: Run) -> None:
    """Fills README.md, docs/performance.md and, if matplotlib is installed, docs/images. Charts that
    cannot be drawn again are not shown: they would be from another run.
    """
    try:
        drawn = charts.draw(run, IMAGES)
    except ImportError:
        drawn = []
        _log("No charts: matplotlib is not installed (`pip install '.[bench]'`).")
    README.write_text(replace_block(README.read_text(), "peers", report.readme_block(run)))
    page = PAGE.read_text()
    for block, text in report.page_blocks(run, drawn).items():
        page = replace_block(page, block, text)
    PAGE.write_text(page)


def _measure(arguments: argparse.Namespace, directory: Path, busy: float) -> str:
    """The history line of one run. `busy`: the share of the CPUs that others used when it began."""
    began = time.monotonic()
    loading.build()
    peers, skipped = _prepare(directory, arguments.only or list(PEERS), arguments.heap)
    neutral, tools, lean = _drivers(peers)
    samples_file = BUILD / f"samples-{datetime.datetime.now():%Y%m%d-%H%M%S}.jsonl"
    bounds = Bounds.quick() if arguments.quick else Bounds()
    seconds = arguments.minutes * 60 - (time.monotonic() - began)
    done: list[Laboratory] = []

    def measure(those: list[Peer], steps: list[plan.Step], seconds: float) -> None:
        laboratory = Laboratory(
            those, neutral, tools, lean, log=_log, seconds=seconds, bounds=bounds, samples_file=samples_file
        )
        done.append(laboratory)
        try:
            laboratory.warm()
            laboratory.run(steps, arguments.rounds)
        finally:
            for peer in those:
                peer.drop()

    alone, clusters = [peer for peer in peers if peer.brokers == 1], [peer for peer in peers if peer.brokers > 1]
    interrupted = False
    try:
        measure(alone, plan.steps(arguments.full, arguments.quick), seconds * (1 - CLUSTERS_SHARE if clusters else 1))
        if clusters:
            measure(clusters, plan.replicated_steps(arguments.quick), seconds * CLUSTERS_SHARE)
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        _log(
            "Interrupted: the table has what was measured so far, and nothing is recorded. Every sample is in"
            f" {samples_file.relative_to(loading.ROOT)}."
        )
        arguments.record = False
    facts = [fact for laboratory in done for fact in laboratory.facts()]
    samples = [sample for laboratory in done for sample in laboratory.samples]
    failures = [failure for laboratory in done for failure in laboratory.failures]
    how = {
        "rounds": done[0].rounds,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "quick": arguments.quick,
        "full": arguments.full,
        "heap": arguments.heap,
        "busy_before": round(busy, 2),
    }
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return results.history_line(date, commit(), machine(), [*facts, *skipped], samples, failures, how)


def main(words: list[str]) -> int:
    arguments = _arguments(words)
    if arguments.pages:
        fill_pages(Run(results.last_run(HISTORY)))
        return 0
    # if it is terminated, it still stops its peers and deletes their data
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = Path(arguments.directory or os.environ.get("MQD_PERF_DIR") or loading.BUILD)
    place.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="peers-", dir=place))
    try:
        if arguments.prepare:
            peers, skipped = _prepare(directory, arguments.only or list(PEERS), arguments.heap)
            for peer in peers:
                print(f"{peer.name} {peer.version()}: ready")
            return 1 if skipped else 0
        busy = wait_until_idle(5.0)
        if busy > BUSY_MAX:
            _log(f"Other programs use {busy:.0%} of the CPUs: they affect every figure of this run.")
        line = _measure(arguments, directory, busy)
    except (LoadFailed, Unavailable) as error:
        _log(f"Cannot measure: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    run = Run(json.loads(line))
    print(report.table(run, rows.headline_rows(), "1 KiB records", markdown=False))
    if lines := targets.target_lines(run):
        print("\n" + report.plain_text(targets.TARGET_HEADINGS, lines))
    print(report.skipped_text(run))
    if arguments.record:
        with HISTORY.open("a") as history:
            history.write(line + "\n")
        fill_pages(run)
        print(
            f"Added to {HISTORY.relative_to(loading.ROOT)}; README.md, docs/performance.md and docs/images/ are filled"
            " from it."
        )
    return 0
