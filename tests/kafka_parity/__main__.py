"""python -m tests.kafka_parity [--api NAME] [--version N] [--seed N] [--cases N] [--case N] [--journal FILE]"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from pathlib import Path

from mqd.protocol import KNOWN
from tests.kafka_parity.allowed import ALLOWED
from tests.kafka_parity.brokers import both
from tests.kafka_parity.compare import Table
from tests.kafka_parity.journal import Journal
from tests.kafka_parity.stories import WHOLE


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kafka_parity", description="mqd beside Apache Kafka, field by field"
    )
    parser.add_argument("--api", action="append", help="only this API (may be repeated: in this order)")
    parser.add_argument("--version", type=int, help="only this version of it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=200, help="for each version of each API (default 200)")
    parser.add_argument("--case", type=int, help="only this one of them, with its requests printed")
    parser.add_argument(
        "--journal",
        type=Path,
        help="continue the run whose journal this is: compare what is missing, and what differed",
    )
    arguments = parser.parse_args()
    # When terminated, it still stops the brokers that it started. An exception alone would be lost
    # where Python ignores it, as in hypothesis' callback of the garbage collector.
    ended: list[int] = []
    signal.signal(
        signal.SIGTERM, lambda number, frame: (ended.append(number), signal.default_int_handler(number, frame))
    )
    table, journal, began = Table(ALLOWED), Journal(arguments.journal), time.monotonic()
    print(f"seed {arguments.seed}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="parity-") as directory,
        both(Path(directory), table, journal) as comparison,
    ):
        if arguments.case is not None:
            comparison.trace = print
        # ctrl-C shows the differences found so far
        with contextlib.suppress(KeyboardInterrupt):
            pairs = [(KNOWN[key].name, key, version) for key, version in comparison.versions()]
            if arguments.api:
                pairs = [pair for api in arguments.api for pair in pairs if pair[0] == api]
            for name, key, version in pairs:
                if ended:
                    break
                if arguments.version not in (None, version):
                    continue
                comparison.run(key, version, arguments.seed, arguments.cases, arguments.case)
                seconds = time.monotonic() - began
                count = comparison.report.cases.get((name, version), 0)
                print(
                    f"{seconds:6.0f} s  {name} {version}: {count} cases, {len(comparison.report.found)} differences",
                    flush=True,
                )
    for line in comparison.report.lines():
        print(line)
    print(
        f"repeat one: python -m tests.kafka_parity --seed {arguments.seed} --cases {arguments.cases} --api API"
        " --version V --case N"
    )
    rotten = [] if arguments.api else journal.unmet(table)
    if rotten:
        print("allowed, but never met:", *rotten, sep="\n  ")
    scarce = [] if arguments.api else comparison.report.scarce(min(arguments.cases, WHOLE))
    if scarce:
        print("too few cases:", *scarce, sep="\n  ")
    return 1 if comparison.report.found or rotten or scarce else 0


if __name__ == "__main__":
    sys.exit(main())
