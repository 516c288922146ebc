"""`python -m perf scale`: what a large cluster costs, by simulation with the real cores; fills docs/scale.md, perf/scale.json and docs/scale-*.svg.

    python -m perf scale gossip      up to 1,000 hosts that gossip (a quarter of an hour)
    python -m perf scale --page      only writes the page and the charts again, from perf/scale.json

Simulated time is no wall time: what else runs on the machine changes nothing but the CPU figures, which are this machine's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from statistics import median

from perf import gossip_scale
from perf.accounting import machine
from perf.charts import Series, line_chart
from perf.loading import ROOT
from perf.report import markdown_table, number, replace_block

RESULT = ROOT / "perf" / "scale.json"
PAGE = ROOT / "docs" / "scale.md"
KNOWN_CHART = ROOT / "docs" / "scale-failure.svg"
RATE_CHART = ROOT / "docs" / "scale-datagrams.svg"

GOSSIP = ((3, 0.01, 2), (10, 0.01, 8), (30, 0.01, 20), (100, 0.01, 40), (300, 0.01, 40), (1000, 0.01, 40), (100, 0.05, 40), (1000, 0.05, 20))  # hosts, loss, failures
AT_ONCE = ((10, 0.01, 0.3), (100, 0.01, 0.1), (1000, 0.01, 0.1))  # hosts, loss, share
SEED = 2026


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure_gossip() -> dict:
    found: dict = {"failures": [], "at_once": []}
    for count, loss, victims in GOSSIP:
        _say(f"gossip: {count} hosts, {loss:.0%} lost, {victims} failures")
        found["failures"].append(gossip_scale.failures(count, loss, victims, SEED))
    for count, loss, share in AT_ONCE:
        _say(f"gossip: {share:.0%} of {count} hosts at once")
        found["at_once"].append(gossip_scale.at_once(count, loss, share, SEED))
    return found


def _seconds(values: list[int], share: float | None = None) -> str:
    ordered = sorted(values)
    value = ordered[-1] if share is None else median(ordered) if share == 0.5 else ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return f"{value / 1000:.1f}"


def gossip_page(result: dict) -> str:
    found, facts = result["gossip"], result["machine"]
    known = [
        (
            f"{one['hosts']:,}", f"{one['loss']:.0%}", str(len(one["dead_for_all_ms"])), _seconds(one["suspected_by_all_ms"], 0.5), _seconds(one["suspected_by_all_ms"]),
            _seconds(one["dead_for_all_ms"], 0.5), _seconds(one["dead_for_all_ms"]), _seconds(one["controller_known_ms"]), f"{one['false_suspicions']} / {one['false_deaths']}",
        )
        for one in found["failures"]
    ]  # fmt: skip
    costs = [
        (
            f"{one['hosts']:,}", f"{one['loss']:.0%}", number(one["idle"]["mean_per_s"]), str(one["idle"]["most_per_s"]), number(one["idle"]["bytes_per_s"] / 1000),
            number(one["mean_per_s"]), str(one["most_per_s"]), number(one["exchange_bytes_per_s"] / 1000), number(one["idle"]["cpu_ms_per_s"]),
        )
        for one in found["failures"]
    ]  # fmt: skip
    together = [
        (
            f"{one['hosts']:,}", str(len(one["dead_for_all_ms"])), _seconds(one["suspected_by_all_ms"]), _seconds(one["dead_for_all_ms"], 0.5), _seconds(one["dead_for_all_ms"]),
            number(one["mean_per_s"]), str(one["most_per_s"]), f"{one['false_suspicions']} / {one['false_deaths']}",
        )
        for one in found["at_once"]
    ]  # fmt: skip
    return "\n\n".join((
        f"Simulated with the broker's own code and settings; CPU time of one core of {facts['cpu']}, {result['gossip_date'][:10]}.",
        "Seconds from the failure of a host until the last of all others knows:",
        markdown_table(
            ("hosts", "datagrams lost", "failures", "suspected, median", "longest", "dead, median", "longest", "a new controller, longest", "false suspicions / deaths"), known, right=range(9)
        ),
        f"![Seconds until all know of a failure, by hosts]({KNOWN_CHART.name})",
        "What one host sends; while hosts fail, one fails every 2.5 s:",
        markdown_table(
            ("hosts", "datagrams lost", "datagrams/s, idle", "most in a second", "kB/s, idle", "datagrams/s, hosts fail", "most in a second", "states by TCP, kB/s", "CPU-ms/s, idle"), costs,
            right=range(9),
        ),
        f"![Datagrams of a host per second, by hosts]({RATE_CHART.name})",
        "Many at the same moment (a rack, a switch):",
        markdown_table(("hosts", "of which fail", "suspected, longest", "dead, median", "dead, longest", "datagrams/s", "most in a second", "false suspicions / deaths"), together, right=range(8)),
    ))


def _curves(found: dict) -> list[dict]:
    return sorted((one for one in found["failures"] if one["loss"] == 0.01), key=lambda one: one["hosts"])


def known_chart(result: dict) -> str:
    points = _curves(result["gossip"])

    def series(name: str, key: str) -> Series:
        spread = [(one["hosts"], min(one[key]) / 1000, median(one[key]) / 1000, max(one[key]) / 1000) for one in points]
        return Series(name, spread, [(point[0], point[2]) for point in spread])

    return line_chart(
        "Until all know of a failed host", "hosts", "seconds", [series("suspected: the controller looks at once", "suspected_by_all_ms"), series("dead", "dead_for_all_ms")]
    )


def rate_chart(result: dict) -> str:
    points = _curves(result["gossip"])
    return line_chart(
        "Datagrams that one host sends", "hosts", "datagrams/s",
        [
            Series("idle: mean, and the most of any host in any second", [(one["hosts"], one["idle"]["mean_per_s"], one["idle"]["mean_per_s"], one["idle"]["most_per_s"]) for one in points], [(one["hosts"], one["idle"]["mean_per_s"]) for one in points]),
            Series("one host fails every 2.5 s", [(one["hosts"], one["mean_per_s"], one["mean_per_s"], one["most_per_s"]) for one in points], [(one["hosts"], one["mean_per_s"]) for one in points]),
        ],
    )  # fmt: skip


def write(result: dict) -> None:
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    text = PAGE.read_text()
    if "gossip" in result:
        text = replace_block(text, "gossip", gossip_page(result))
        KNOWN_CHART.write_text(known_chart(result))
        RATE_CHART.write_text(rate_chart(result))
    PAGE.write_text(text)


PARTS: dict[str, Callable[[], dict]] = {"gossip": measure_gossip}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; all unless told")
    parser.add_argument("--page", action="store_true", help="only write the page and the charts again")
    arguments = parser.parse_args(words)
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for part in [] if arguments.page else arguments.parts or list(PARTS):
        result |= {part: PARTS[part](), f"{part}_date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "machine": machine()}
        write(result)
    write(result)
    return 0
