"""`make bench`, or `python -m perf [CASE...]`: measures mqd on this machine.

python -m perf                   everything, three times over, about half an hour; appends
                                 one line to perf/history.jsonl
python -m perf produce fetch     these cases only; nothing is appended unless --record. With it,
                                 --page shows their figures among those of the last whole run,
                                 marked with † until the next whole run
python -m perf settings          the effect of settings; fills docs/performance.md
python -m perf scaling           how rate and CPU grow with workers and clients; fills
                                 docs/performance.md, perf/scaling.json, docs/scaling.svg
python -m perf scale             large clusters, simulated and real; fills docs/scale.md;
                                 `python -m perf scale --help`
python -m perf local             the shared-memory path and TCP; fills docs/performance.md
python -m perf --figures         fills mqd/cli/sizing.json, the costs that `mqd size` uses, from
                                 the last line of perf/history.jsonl and perf/scaling.json
python -m perf --page            fills docs/performance.md from the last whole run in
                                 perf/history.jsonl, and from later runs of some cases
python -m perf picture           draws the README's picture of a broker at work
python -m perf beside REVISION CASE...
                                 this tree and an older one, in turns
python -m perf alternate REVISION
                                 the same for produce and fetch: both brokers run, many short loads
python -m perf peers ...         mqd compared with its peers; `python -m perf peers --help`
python -m perf queues ...        mqd's work queues and its peers'; `python -m perf queues --help`
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from pathlib import Path

from perf import cases_local, report, scaling, sizing
from perf.accounting import machine, wait_until_idle
from perf.bench import PASSES, Bench
from perf.brokers import Brokers
from perf.cases import CASES
from perf.loading import BUILD, ROOT, LoadFailed, build
from perf.revision import commit
from perf.settings import settings_page
from tests import bytecode

HISTORY = ROOT / "perf" / "history.jsonl"
PAGE = ROOT / "docs" / "performance.md"
PAGES = ("settings", "scaling")  # run only when named, unlike the cases
LOCAL = "local"  # all cases of the shared-memory path


def _log(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help=f"{', '.join((*PAGES, LOCAL))}, or any of: {', '.join(CASES)} (all of these by default)",
    )
    parser.add_argument("--page", action="store_true", help="only fill docs/performance.md from the last run")
    parser.add_argument("--figures", action="store_true", help="only fill mqd/cli/sizing.json from the last runs")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two repetitions and 1 GB instead of 10: to try the bench, not to measure the broker",
    )
    parser.add_argument(
        "--record",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="append to perf/history.jsonl (the default for a whole run that is not --quick)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="where the brokers keep their data while they are measured (default: .build/perf, or MQD_PERF_DIR)",
    )
    arguments = parser.parse_args(words)
    if LOCAL in arguments.cases:
        arguments.cases = [*(case for case in arguments.cases if case != LOCAL), *cases_local.CASES]
    unknown = [case for case in arguments.cases if case not in (*CASES, *PAGES)]
    if unknown:
        parser.error(f"no case {unknown[0]}; there are: {', '.join((*PAGES, LOCAL, *CASES))}")
    return arguments


def _measure(bench: Bench, names: list[str]) -> None:
    for _ in bench.passes():
        for name, case in CASES.items():
            if name in names:
                case(bench)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    bytecode.keep_apart(BUILD / "bytecode")
    if words[:1] == ["peers"]:
        from perf.peers import command  # here: its imports are needed only for peers

        return command.main(words[1:])
    if words[:1] == ["queues"]:
        from perf.peers import queues  # here: its imports are needed only for peers

        return queues.main(words[1:])
    if words[:1] == ["picture"]:
        from perf import picture  # here: it measures nothing

        picture.draw()
        return 0
    if words[:1] == ["beside"]:
        from perf.trees import beside  # here: it runs the bench of two trees

        return beside.main(words[1:])
    if words[:1] == ["alternate"]:
        from perf.trees import alternate

        return alternate.main(words[1:])
    if words[:1] == ["scale"]:
        from perf import scale  # here: it simulates, and measures no broker

        return scale.main(words[1:])
    arguments = _arguments(words)
    if arguments.page:
        run, *later = report.last_runs(HISTORY)
        PAGE.write_text(
            report.replace_block(PAGE.read_text(), "bench", report.page_block(run, later, cases_local.TARGETS))
        )
        return 0
    if arguments.figures:
        sizing.write(report.last_run(HISTORY), scaling.RESULT)
        return 0
    # if the bench is terminated, it still stops its brokers and deletes their data
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    build()
    names = [case for case in arguments.cases if case not in PAGES] or ([] if arguments.cases else list(CASES))
    passes = 1 if arguments.cases or arguments.quick else PASSES
    busy = wait_until_idle(5.0)
    if busy > 0.2:
        print(
            f"Other programs use {busy:.0%} of the CPUs: they affect rates and latencies; CPU time is less affected.",
            file=sys.stderr,
        )
    try:
        with Brokers(arguments.directory) as brokers:
            bench = Bench(brokers, _log, arguments.quick, passes)
            if "settings" in arguments.cases:
                page = PAGE.read_text()
                for block, text in settings_page(bench).items():
                    page = report.replace_block(page, block, text)
                PAGE.write_text(page)
            if "scaling" in arguments.cases:
                scaling.write(scaling.measure(bench), PAGE)
            if names:
                _measure(bench, names)
            facts = {**machine(), "disturbed": f"{bench.disturbed} of {bench.measured}"}
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            if set(cases_local.CASES) <= set(names) and not arguments.quick:
                PAGE.write_text(
                    report.replace_block(PAGE.read_text(), LOCAL, cases_local.page(bench.figures, facts, date))
                )
    except LoadFailed as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if names:
        print("\n" + report.plain_table(bench.figures))
        print(
            f"\n{bench.measured - bench.disturbed} of {bench.measured} CPU measurements were undisturbed by other"
            " programs."
        )
    record = arguments.record if arguments.record is not None else not arguments.cases and not arguments.quick
    if record:
        kind = report.TRIAL_KIND if arguments.quick else report.CASES_KIND if arguments.cases else ""
        more = {"kind": kind, "cases": names} if kind else {}
        with HISTORY.open("a") as history:
            history.write(report.history_line(date, commit(), facts, bench.figures, **more) + "\n")
        print(f"Added to {HISTORY.relative_to(ROOT)}; `python -m perf --page` shows it in docs/performance.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
