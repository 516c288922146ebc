"""python -m perf.security [--quick]: CPU of mqd with TLS, compared with Apache Kafka with the same certificate, in
a few minutes; fills docs/performance.md unless --quick. Needs Java 17, and Maven for Kafka's jars.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from perf import report
from perf.bench import Bench
from perf.brokers import Brokers
from perf.loading import ROOT, LoadFailed, build
from perf.peers.peer import Unavailable
from perf.peers.processes import PeerFailed
from perf.revision import provenance
from perf.security.beside_kafka import WAYS, WHAT, beside_kafka

PAGE = ROOT / "docs" / "performance.md"


def page(figures: list[report.Figure], kafka_version: str) -> str:
    """The block of docs/performance.md."""
    found = {figure.name: figure for figure in figures}
    head = f"{provenance('python -m perf.security')}, beside Apache Kafka {kafka_version}."
    lines = []
    for what in WHAT:
        for way in WAYS:
            mqd, kafka, part = (
                found[f"{what}, {way}, {name}"] for name in ("mqd", "Apache Kafka", "mqd's part of Apache Kafka's")
            )
            lines.append(
                (f"{what}, {way}", report.number(mqd.median), report.number(kafka.median))
                + (f"**{report.number(part.median)}**", report.spread(part), part.target_text)
            )
    headings = ("broker CPU-ms per MiB", "mqd", "Apache Kafka", "mqd ÷ Kafka", "spread", "target")
    return f"{report.paragraph(head)}\n\n{report.markdown_table(headings, lines, right=(1, 2, 3, 4, 5))}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.security", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two repetitions; the page stays as it is")
    parser.add_argument("--directory", type=Path, help="where the brokers keep their data")
    arguments = parser.parse_args()
    # if it is terminated, it still stops its brokers and deletes their data
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    build()
    try:
        with Brokers(arguments.directory) as brokers:
            bench = Bench(brokers, lambda line: print(line, file=sys.stderr), arguments.quick)
            kafka_version = beside_kafka(bench)
    except (LoadFailed, PeerFailed, Unavailable) as error:
        print(error, file=sys.stderr)
        return 1
    print(report.plain_table(bench.figures))
    if not arguments.quick:
        PAGE.write_text(report.replace_block(PAGE.read_text(), "security", page(bench.figures, kafka_version)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
