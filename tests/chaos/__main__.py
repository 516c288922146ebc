"""`make chaos-cluster`, or `python -m tests.chaos`: real brokers in network namespaces under
faults, real clients, and a checker of their histories.

    python -m tests.chaos                        the quick tier: about ten minutes over several
                                                 seeds
    python -m tests.chaos --seconds 3600         for this long, seed after seed
    python -m tests.chaos --seed 17 --keep       one seed; its directory stays (histories, final logs, the brokers' logs)
    python -m tests.chaos --kinds pair,restart   only these faults
    python -m tests.chaos --secured              users, rights, TLS; rights and passwords come and go, certificates and keys change
    python -m tests.chaos --queues               share groups, schedules, views, deduplication: queues/
    python -m tests.chaos --results FILE         each seed's line is appended there too, so that pieces add up over days
    python -m tests.chaos --add-up FILE...       the sum of these pieces: seconds, faults, records,
                                                 anomalies, availability in client seconds

Without --seed, --secured and --queues, every third run is one with queues. One JSON line for each seed. Exit code 1 when something was found, 0 otherwise, even when it cannot
run here (the reason is printed).
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import checker, network, total
from tests.chaos.faults import KINDS, SECURED
from tests.chaos.queues.run import WITHOUT as QUEUES_WITHOUT
from tests.chaos.queues.run import QueueRun
from tests.chaos.run import Plan, Result, Run

QUICK_SECONDS = 600.0
SEED_SECONDS = 90.0  # of faults; with start, healing and checking a seed takes about a minute more
OVERHEAD_SECONDS = 60.0
QUEUES_EVERY = 3


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=QUICK_SECONDS, help="all together")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seed-seconds", type=float, default=SEED_SECONDS, help="of faults for each seed")
    parser.add_argument("--secured", action="store_true", help="a cluster with users, rights and TLS")
    parser.add_argument("--queues", action="store_true", help="share groups, schedules, views, deduplication")
    parser.add_argument(
        "--kinds", help=f"faults (default: all): {', '.join(KINDS)}; with --secured also {', '.join(SECURED)}"
    )
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--results", type=Path, help="a file that each seed's line is appended to")
    parser.add_argument(
        "--add-up", type=Path, nargs="+", metavar="FILE", help="run nothing; say what the runs in these files come to"
    )
    parser.add_argument(
        "--keep", action="store_true", help="the directory of each run stays, even of one that found nothing"
    )
    parser.add_argument(
        "--directory", type=Path, help="where the runs' directories are made (default: the system's temporary one)"
    )
    arguments = parser.parse_args(words)
    known = [*KINDS, *(SECURED if arguments.secured else ())]
    arguments.kinds = known if arguments.kinds is None else [kind for kind in arguments.kinds.split(",") if kind]
    unknown = [kind for kind in arguments.kinds if kind not in known]
    if unknown:
        parser.error(f"no fault {unknown[0]}; there are: {', '.join(known)}")
    if arguments.secured and arguments.queues:
        parser.error("--secured and --queues are different runs")
    return arguments


def _plan(seed: int, arguments: argparse.Namespace) -> Plan:
    is_mixed = arguments.seed is None and not arguments.secured
    queues = arguments.queues or (is_mixed and seed % QUEUES_EVERY == 0)
    kinds = [kind for kind in arguments.kinds if not (queues and kind in QUEUES_WITHOUT)]
    return Plan(seed, arguments.seed_seconds, kinds, arguments.hosts, secured=arguments.secured, queues=queues)


def _one(plan: Plan, arguments: argparse.Namespace) -> Result:
    directory = Path(tempfile.mkdtemp(prefix=f"mqd-chaos-{plan.seed}-", dir=arguments.directory))
    result = (QueueRun if plan.queues else Run)(
        plan, directory, lambda line: print(f"  {line}", file=sys.stderr, flush=True)
    )()
    print(result.line(), flush=True)
    if arguments.results is not None:
        with arguments.results.open("a") as file:
            file.write(result.line() + "\n")
    if result.ok and not arguments.keep:
        shutil.rmtree(directory, ignore_errors=True)
        return result
    if not result.ok:
        print(checker.summary(result.anomalies) or result.failure, file=sys.stderr)
        print(
            f"  again: python -m tests.chaos --seed {plan.seed} --seed-seconds {plan.seconds:g} --kinds"
            f" {','.join(plan.kinds)}{' --secured' * plan.secured}{' --queues' * plan.queues}",
            file=sys.stderr,
        )
    print(f"  kept: {directory}", file=sys.stderr)
    return result


def main(words: list[str] | None = None) -> int:
    arguments = _arguments(words)
    if arguments.add_up:
        added = total.of_files(arguments.add_up)
        print(total.report(added))
        return 0 if added.clean else 1
    if reason := network.why_not():
        print(f"the chaos tests of a cluster do not run here: {reason}")
        return 0
    # when terminated, even in a shell's background, it still stops its brokers and removes its
    # namespaces
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    began, seed, failed = time.monotonic(), arguments.seed or arguments.first_seed, 0
    while True:
        failed += not _one(_plan(seed, arguments), arguments).ok
        seed += 1
        if (
            arguments.seed is not None
            or time.monotonic() - began + arguments.seed_seconds + OVERHEAD_SECONDS > arguments.seconds
        ):
            return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
