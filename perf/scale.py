"""`python -m perf scale`: the costs of a large cluster, by simulation with the real cores and by one run
of real brokers; fills docs/scale.md, perf/scale.json and docs/scale-*.svg.

    python -m perf scale gossip      up to 1,000 hosts that gossip (a quarter of an hour)
    python -m perf scale control     the metadata of up to a million partitions (some minutes, 3 GB of memory)
    python -m perf scale cluster     three real brokers, 200,000 partitions (four minutes)
    python -m perf scale --page      only writes the page and the charts again, from perf/scale.json

The times of gossip and control are simulated: other programs on the machine affect only their CPU
figures. Those of cluster are the machine's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from statistics import median

from mqd.controller.server import SEND_BYTES_MAX
from perf import cluster_scale, control_scale, gossip_scale
from perf.accounting import machine
from perf.charts import Series, line_chart
from perf.loading import ROOT
from perf.report import markdown_table, number, replace_block

RESULT = ROOT / "perf" / "scale.json"
PAGE = ROOT / "docs" / "scale.md"
FAILURE_CHART = ROOT / "docs" / "scale-failure.svg"
RATE_CHART = ROOT / "docs" / "scale-datagrams.svg"

# hosts, loss, failures
GOSSIP = (
    (3, 0.01, 2),
    (10, 0.01, 8),
    (30, 0.01, 20),
    (100, 0.01, 40),
    (300, 0.01, 40),
    (1000, 0.01, 40),
    (100, 0.05, 40),
    (1000, 0.05, 20),
)
AT_ONCE = ((10, 0.01, 0.3), (100, 0.01, 0.1), (1000, 0.01, 0.1))  # hosts, loss, share
SEED = 2026

CATCH_UP_CHART = ROOT / "docs" / "scale-catch-up.svg"
CATCH_UP = (10_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
FAILOVER = ((200_000, 60, 3_000), (200_000, 60, 10_000), (1_000_000, 1_000, 10_000))  # partitions, hosts, leaders
CLUSTER = (200_000, 10_000)  # partitions, and those of them that three brokers have on disk
HEARTBEATS = ((10_000, 10), (200_000, 200), (1_000_000, 1_000))


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure_gossip() -> dict:
    found: dict = {"failures": [], "at_once": []}
    for count, loss, victims in GOSSIP:
        _log(f"gossip: {count} hosts, {loss:.0%} lost, {victims} failures")
        found["failures"].append(gossip_scale.failures(count, loss, victims, SEED))
    for count, loss, share in AT_ONCE:
        _log(f"gossip: {share:.0%} of {count} hosts at the same time")
        found["at_once"].append(gossip_scale.simultaneous_failures(count, loss, share, SEED))
    return found


def _seconds(values: list[int], share: float | None = None) -> str:
    ordered = sorted(values)
    value = (
        ordered[-1]
        if share is None
        else median(ordered)
        if share == 0.5
        else ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    )
    return f"{value / 1000:.1f}"


def gossip_page(result: dict) -> str:
    found, facts = result["gossip"], result["machine"]
    known = [
        (
            f"{one['hosts']:,}",
            f"{one['loss']:.0%}",
            str(len(one["dead_for_all_ms"])),
            _seconds(one["suspected_by_all_ms"], 0.5),
            _seconds(one["suspected_by_all_ms"]),
            _seconds(one["dead_for_all_ms"], 0.5),
            _seconds(one["dead_for_all_ms"]),
            _seconds(one["controller_known_ms"]),
            f"{one['false_suspicions']} / {one['false_deaths']}",
        )
        for one in found["failures"]
    ]
    costs = [
        (
            f"{one['hosts']:,}",
            f"{one['loss']:.0%}",
            number(one["idle"]["mean_per_s"]),
            str(one["idle"]["most_per_s"]),
            number(one["idle"]["bytes_per_s"] / 1000),
            number(one["mean_per_s"]),
            str(one["most_per_s"]),
            number(one["exchange_bytes_per_s"] / 1000),
            number(one["idle"]["cpu_ms_per_s"]),
        )
        for one in found["failures"]
    ]
    together = [
        (
            f"{one['hosts']:,}",
            str(len(one["dead_for_all_ms"])),
            _seconds(one["suspected_by_all_ms"]),
            _seconds(one["dead_for_all_ms"], 0.5),
            _seconds(one["dead_for_all_ms"]),
            number(one["mean_per_s"]),
            str(one["most_per_s"]),
            f"{one['false_suspicions']} / {one['false_deaths']}",
        )
        for one in found["at_once"]
    ]
    return "\n\n".join(
        (
            (
                f"Simulated with the broker's own code and settings; CPU time of one core of {facts['cpu']},"
                f" {result['gossip_date'][:10]}."
            ),
            "Seconds from the failure of a host until all others know of it:",
            markdown_table(
                (
                    "hosts",
                    "datagrams lost",
                    "failures",
                    "suspected, median",
                    "longest",
                    "dead, median",
                    "longest",
                    "until all know the new controller, longest",
                    "false suspicions / deaths",
                ),
                known,
                right=range(9),
            ),
            f"![Seconds until all hosts know of a failure, by number of hosts]({FAILURE_CHART.name})",
            "What one host sends, when idle and while one host fails every 2.5 s:",
            markdown_table(
                (
                    "hosts",
                    "datagrams lost",
                    "datagrams/s, idle",
                    "most in a second",
                    "kB/s, idle",
                    "datagrams/s while hosts fail",
                    "most in a second",
                    "full states over TCP, kB/s",
                    "CPU-ms/s, idle",
                ),
                costs,
                right=range(9),
            ),
            f"![Datagrams of a host per second, by number of hosts]({RATE_CHART.name})",
            "Many hosts fail at the same moment (a rack, a switch):",
            markdown_table(
                (
                    "hosts",
                    "hosts that fail",
                    "suspected, longest",
                    "dead, median",
                    "dead, longest",
                    "datagrams/s",
                    "most in a second",
                    "false suspicions / deaths",
                ),
                together,
                right=range(8),
            ),
        )
    )


def _curves(found: dict) -> list[dict]:
    return sorted((one for one in found["failures"] if one["loss"] == 0.01), key=lambda one: one["hosts"])


def failure_chart(result: dict) -> str:
    points = _curves(result["gossip"])

    def series(name: str, key: str) -> Series:
        spread = [(one["hosts"], min(one[key]) / 1000, median(one[key]) / 1000, max(one[key]) / 1000) for one in points]
        return Series(name, spread, [(point[0], point[2]) for point in spread])

    return line_chart(
        "Until all know of a failed host",
        "hosts",
        "seconds",
        [series("suspected: the controller probes", "suspected_by_all_ms"), series("dead", "dead_for_all_ms")],
    )


def rate_chart(result: dict) -> str:
    points = _curves(result["gossip"])
    return line_chart(
        "Datagrams that one host sends",
        "hosts",
        "datagrams/s",
        [
            Series(
                "idle: mean, and the most of any host in any second",
                [
                    (one["hosts"], one["idle"]["mean_per_s"], one["idle"]["mean_per_s"], one["idle"]["most_per_s"])
                    for one in points
                ],
                [(one["hosts"], one["idle"]["mean_per_s"]) for one in points],
            ),
            Series(
                "one host fails every 2.5 s",
                [(one["hosts"], one["mean_per_s"], one["mean_per_s"], one["most_per_s"]) for one in points],
                [(one["hosts"], one["mean_per_s"]) for one in points],
            ),
        ],
    )


def write(result: dict) -> None:
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    text = PAGE.read_text()
    if "gossip" in result:
        text = replace_block(text, "gossip", gossip_page(result))
        FAILURE_CHART.write_text(failure_chart(result))
        RATE_CHART.write_text(rate_chart(result))
    if "control" in result:
        text = replace_block(text, "control", control_page(result))
        CATCH_UP_CHART.write_text(catch_up_chart(result))
    if "cluster" in result:
        text = replace_block(text, "cluster", cluster_page(result))
    PAGE.write_text(text)


# -- the control plane -----------------------------------------------------------------------------


def measure_control() -> dict:
    found: dict = {"catch_up": [], "failover": [], "heartbeats": []}
    for partitions in CATCH_UP:
        _log(f"catch-up: {partitions:,} partitions")
        found["catch_up"].append(control_scale.catch_up(partitions, max(10, partitions // 1_000)))
    for partitions, hosts, leaders in FAILOVER:
        _log(f"failover: {leaders:,} leaders of {partitions:,}")
        found["failover"].append(control_scale.failover(partitions, hosts, leaders))
    for partitions, hosts in HEARTBEATS:
        _log(f"heartbeats: {hosts:,} hosts")
        found["heartbeats"].append(control_scale.heartbeats(partitions, hosts))
    return found


def _steps(found: list[dict], first: tuple[str, ...], columns: list[str]) -> str:
    """A table with the steps as rows."""
    rows = [tuple([name, *(f"{one['steps'][name]:.3f}" for one in found)]) for name in found[0]["steps"]]
    rows.append(("**all of it**", *(f"**{one['total_s']:.2f}**" for one in found)))
    return markdown_table((*first, *columns), rows, right=range(1, len(columns) + 1))


def _partitions_that_fit(measured: dict) -> int:
    """How many partitions an image of SEND_BYTES_MAX has room for, rounded down to 10,000."""
    return int(SEND_BYTES_MAX / (measured["image_bytes"] / measured["partitions"]) / 10_000) * 10_000


def control_page(result: dict) -> str:
    found, facts = result["control"], result["machine"]
    catch_up = found["catch_up"]
    beats = [
        (
            f"{one['hosts']:,}",
            f"{one['partitions']:,}",
            number(one["heartbeat_us"]),
            number(one["heartbeats_ms_per_s"]),
            number(one["tick_ms"]),
        )
        for one in found["heartbeats"]
    ]
    return "\n\n".join(
        (
            (
                f"CPU seconds of one core of {facts['cpu']}, {result['control_date'][:10]}; medians of"
                f" {control_scale.REPETITIONS}."
            ),
            (
                "**A new broker** gets the whole metadata of a cluster with one host per 1,000 partitions (at least 10"
                " hosts)."
                f" The snapshot has {catch_up[-1]['snapshot_bytes'] / catch_up[-1]['partitions']:.0f} bytes per"
                " partition, so 200,000 partitions are"
                f" {next(one for one in catch_up if one['partitions'] == 200_000)['snapshot_bytes'] / 1e6:.0f} MB."
            ),
            _steps(catch_up, ("partitions",), [f"{one['partitions']:,}" for one in catch_up]),
            f"![CPU seconds to catch up, by partitions]({CATCH_UP_CHART.name})",
            (
                "**Hosts fail together** (a rack, a switch); other hosts take over the leadership of their"
                " partitions in one batch of the log."
            ),
            _steps(
                found["failover"],
                ("leaders that move, of all partitions",),
                [f"{one['leaders']:,} of {one['partitions']:,}" for one in found["failover"]],
            ),
            (
                f"An image has {catch_up[-1]['image_bytes'] / catch_up[-1]['partitions']:.0f} bytes per partition. A"
                f" subscriber that leaves {SEND_BYTES_MAX >> 20} MiB unread is disconnected, so beyond about"
                f" {_partitions_that_fit(catch_up[-1]):,}"
                " partitions a host's processes could not receive a whole image; a million would need images to be sent"
                " in parts. The [limit of a cluster](#limits) is lower."
            ),
            (
                f"The batch of {found['failover'][1]['leaders']:,} leaders takes"
                f" {found['failover'][1]['record_bytes'] / 1e6:.1f} MB in the log and"
                f" {found['failover'][1]['update_bytes'] / 1e6:.1f} MB as an update to each process."
            ),
            (
                "**The active controller at rest**: every host's heartbeat once a second, and the housekeeping"
                " that checks all partitions once a second."
            ),
            markdown_table(
                ("hosts", "partitions", "CPU-µs a heartbeat", "heartbeats, CPU-ms/s", "housekeeping, CPU-ms/s"),
                beats,
                right=range(5),
            ),
        )
    )


def catch_up_chart(result: dict) -> str:
    curve = [(one["partitions"], one["total_s"]) for one in result["control"]["catch_up"]]
    return line_chart(
        "A broker takes over the whole metadata",
        "partitions",
        "CPU seconds",
        [Series("all steps", [(x, y, y, y) for x, y in curve], curve)],
    )


# -- real brokers ----------------------------------------------------------------------------------


def measure_cluster() -> dict:
    _log("cluster: {:,} partitions, {:,} of them on three brokers' disks".format(*CLUSTER))
    return cluster_scale.one_run(*CLUSTER)


def cluster_page(result: dict) -> str:
    found, facts = result["cluster"], result["machine"]
    rows = [
        ("partitions in the metadata", f"{found['partitions']:,}"),
        ("replicas on the disks of three brokers", f"{found['on_disk']:,}"),
        (
            "partitions created per second (three replicas each; timed until all are in sync)",
            number(found["created_per_s"]),
        ),
        ("memory of a broker, all processes, MB (PSS)", number(found["pss_mb"])),
        ("CPU of a broker at rest, % of a core", number(found["idle_percent"])),
        (
            f"seconds until all {found['leaders']:,} partitions of a killed leader have a new leader",
            number(found["elected_s"]),
        ),
        ("longest pause of acknowledged writes meanwhile, s", number(found["writes_paused_s"])),
        ("seconds until the killed broker is ready again", number(found["ready_s"])),
        ("seconds until all its replicas are in sync again", number(found["in_sync_s"])),
    ]
    head = f"{facts['cores']} cores of {facts['cpu']} for all brokers, {result['cluster_date'][:10]}; one run."
    return f"{head}\n\n{markdown_table(('one run of real brokers', 'measured'), rows, right=(1,))}"


PARTS: dict[str, Callable[[], dict]] = {
    "gossip": measure_gossip,
    "control": measure_control,
    "cluster": measure_cluster,
}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; all by default")
    parser.add_argument("--page", action="store_true", help="only write the page and the charts again")
    arguments = parser.parse_args(words)
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for part in [] if arguments.page else arguments.parts or list(PARTS):
        found = PARTS[part]()
        result = json.loads(RESULT.read_text()) if RESULT.exists() else {}  # another part may have run meanwhile
        result |= {
            part: found,
            f"{part}_date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
        }
        write(result)
    write(result)
    return 0
