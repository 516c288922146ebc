"""python -m perf.security [--quick]: CPU of mqd with TLS, compared with Apache Kafka with the same certificate, in
a few minutes; fills docs/performance.md unless --quick. Needs Java 17, and Maven for Kafka's jars.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from pathlib import Path

from perf import report
from perf.accounting import machine
from perf.bench import Bench
from perf.brokers import Brokers
from perf.loading import ROOT, LoadFailed, build
from perf.peers.peer import Unavailable
from perf.peers.processes import PeerFailed
from perf.revision import commit
from perf.security.beside_kafka import WAYS, WHAT, beside_kafka

PAGE = ROOT / "docs" / "performance.md"


def page(figures: list[report.Figure]) -> str:
    """The block of docs/performance.md."""
    found, facts = {figure.name: figure for figure in figures}, machine()
    head = (
        f"`python -m perf.security` on {facts['cores']} cores of {facts['cpu']}, Linux {facts['kernel']},"
        f" {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, commit {commit()[:10]}."
    )
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
            beside_kafka(bench)
    except (LoadFailed, PeerFailed, Unavailable) as error:
        print(error, file=sys.stderr)
        return 1
    print(report.plain_table(bench.figures))
    if not arguments.quick:
        PAGE.write_text(report.replace_block(PAGE.read_text(), "security", page(bench.figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
