"""The problems of a broker and its cluster, the most harmful first, and how to fix them.

Pure functions over the data that mqd/cli/verbs/doctor.py collects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mqd.cli.cluster_view import partitions_text

if TYPE_CHECKING:
    from mqd.cli.cluster_view import ClusterState, PartitionHealth
    from mqd.cli.group_listing import Group
    from mqd.cli.inspection.metrics_page import Sample
    from mqd.cli.offline_replicas import OfflineReplica

RESTARTS_MAX = 3
CLOCK_SKEW_MS_MAX = 2_000
FREE_MIN, FREE_LOW = 0.02, 0.10  # fractions of the space
CERTIFICATE_S_MIN = 14 * 86400
LAG_S_MAX = 600.0
REBALANCE_MS_MAX = 10_000
OPEN_FILES_MIN = 10_000
SWAPPINESS_MAX = 10
DAY_S = 86400
STALLED_S_MIN = 60.0
COMMIT_INTERVAL_S = 6.0  # members commit at least this often: auto.commit.interval.ms is 5 s by default
FLUSH_SAMPLE_GAP_S = 2.0  # between the two samples of flush_findings()
FLUSH_S_MAX = 10.0
_END, _HIGH_WATERMARK = "mqd_partition_log_end_offset", "mqd_partition_high_watermark"


class Harm(IntEnum):
    """The kinds of harm, the worst first. Their names are in the JSON of `mqd doctor`."""

    LOSS = 0
    OUTAGE = 1
    NO_RESERVE = 2  # the next failure would interrupt service
    NUISANCE = 3


DISK_HANGS = (
    "dmesg, smartctl and iostat -x show what hangs; if it persists, let other hosts lead this host's partitions (mqd"
    " cluster drain); to run without the directory, remove it from log.dirs and restart the broker"
)
CLOCK_REMEDY = "timedatectl timesync-status, or chronyc tracking, on both hosts"
TITLES = {
    Harm.LOSS: "records at risk",
    Harm.OUTAGE: "clients are not served",
    Harm.NO_RESERVE: "one more failure would interrupt service",
    Harm.NUISANCE: "slow, or may cause problems later",
}


class Finding(NamedTuple):
    """`cure`: a command, or an instruction."""

    harm: Harm
    what: str
    cure: str


def process_findings(status: Mapping[str, Any]) -> list[Finding]:
    """`status`: the output of `mqd status --format json`."""
    logs = Path(status["data_dir"]) / "logs"
    if "reason" in status:
        return [
            Finding(
                Harm.OUTAGE,
                f"no broker is running in {status['data_dir']}: {status['reason']}",
                f"mqd up --data-dir {status['data_dir']}; if it ended by itself, {logs} shows why",
            )
        ]
    findings = []
    for process in status["processes"]:
        log = logs / f"{process['name']}.log"
        if process["state"] != "running":
            findings.append(
                Finding(Harm.OUTAGE, f"{process['name']} is {process['state']}", f"{log} shows what it waits for")
            )
        elif process["restart_count"] > RESTARTS_MAX:
            findings.append(
                Finding(
                    Harm.NO_RESERVE,
                    f"{process['name']} has died {process['restart_count']} times since the broker started",
                    f"the last lines of {log} before each start show why",
                )
            )
    return findings


def cluster_findings(
    state: ClusterState, partitions: PartitionHealth, offline: Iterable[OfflineReplica], now_ms: int
) -> list[Finding]:
    findings = []
    unserved = list(offline)
    reported = {replica.partition for replica in unserved}
    findings += [
        Finding(
            Harm.OUTAGE,
            replica.text(),
            "repair or replace that disk, then restart the host's broker; mqd log verify checks the files",
        )
        for replica in unserved
    ]
    unexplained = [
        (name, index, nodes) for name, index, nodes in partitions.leaderless if f"{name}-{index}" not in reported
    ]
    if unexplained:
        nodes = sorted({node for _, _, replicas in unexplained for node in replicas})
        findings.append(
            Finding(
                Harm.OUTAGE,
                "without a leader, neither read nor written:"
                f" {partitions_text([f'{name}-{index}' for name, index, _ in unexplained])}",
                f"start the hosts that have their replicas: {', '.join(map(str, nodes))}",
            )
        )
    findings += [
        Finding(
            Harm.NO_RESERVE,
            f"broker {broker.broker_id} ({broker.host}:{broker.port}) is fenced: its heartbeats do not reach the"
            " controllers",
            "on that host: mqd status; start it if it is down, else check whether it reaches the controllers' port",
        )
        for broker in state.brokers
        if broker.is_fenced
    ]
    if state.voter_status.silent_or_behind:
        findings.append(
            Finding(
                Harm.NO_RESERVE,
                f"voters {', '.join(map(str, state.voter_status.silent_or_behind))} of the metadata quorum are silent"
                f" or behind; the quorum can lose {state.voter_status.losses_allowed or 'no'} more",
                "start their hosts; mqd cluster status shows each voter",
            )
        )
    fenced = {broker.broker_id for broker in state.brokers if broker.is_fenced}
    for node, names in sorted(partitions.behind.items()):
        out_of_service = node in fenced or node not in {broker.broker_id for broker in state.brokers}
        findings.append(
            Finding(
                Harm.NO_RESERVE,
                f"broker {node} is not in sync in {partitions_text(names)}"
                + (
                    ": it is not in service"
                    if out_of_service
                    else ", though it is in service: it is too slow, or is catching up"
                ),
                f"start broker {node}; it fetches what it lacks. If its disks are lost: docs/operations.md,"
                " One host is lost"
                if out_of_service
                else f"mqd doctor and mqd top on the host of broker {node}: a slow disk (mqd_sync_seconds), a busy CPU,"
                " its network, or, during a reassignment, a throttle that is too low (mqd topic reassign)",
            )
        )
    skew_ms = now_ms - state.voter_status.now_ms
    if state.voter_status.now_ms >= 0 and abs(skew_ms) > CLOCK_SKEW_MS_MAX:
        findings.append(
            Finding(
                Harm.NUISANCE,
                f"this host's clock is {abs(skew_ms) / 1000:.0f} s {'ahead of' if skew_ms > 0 else 'behind'} the active"
                f" controller's (broker {state.quorum.leader_id}): times of records and retention are wrong on"
                " one of them",
                CLOCK_REMEDY,
            )
        )
    return findings


def clock_findings(address: str, ahead_s: float) -> list[Finding]:
    """`ahead_s`: by how much the broker's clock is ahead of this host's."""
    if abs(ahead_s) * 1000 <= CLOCK_SKEW_MS_MAX:
        return []
    return [
        Finding(
            Harm.NUISANCE,
            f"the clock of the broker at {address} is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
            " this host's: times of records and retention are wrong on one of them",
            CLOCK_REMEDY,
        )
    ]


def group_findings(groups: Iterable[Group]) -> list[Finding]:
    findings = []
    for group in groups:
        rebalance = group.rebalance
        if rebalance is None or rebalance.elapsed_ms < REBALANCE_MS_MAX:
            continue
        holders = ", ".join(
            f"{member.client_id or member.member_id} at {member.host}" for member in rebalance.held_up_by
        )
        findings.append(
            Finding(
                Harm.NUISANCE,
                f"group {group.group} has been rebalancing for {rebalance.elapsed_ms / 1000:.0f} s"
                + (f" and waits for {holders}" if holders else ""),
                f"stop that member, or let it poll again; mqd group describe {group.group}",
            )
        )
    return findings


def metric_findings(samples: Iterable[Sample], now_s: float, data_dir: str) -> list[Finding]:
    findings = []
    total_bytes = {}
    behind: dict[tuple[str, str], float] = {}
    listed = list(samples)
    for sample in listed:
        if sample.name == "mqd_log_dir_total_bytes":
            total_bytes[sample.labels["directory"]] = sample.value
    for sample in listed:
        labels = sample.labels
        partition = f"{labels.get('topic')}-{labels.get('partition')}"
        if sample.name == "mqd_corrupt_segments" and sample.value:
            findings.append(
                Finding(
                    Harm.LOSS,
                    f"{sample.value:.0f} stored segments of {partition} are corrupt",
                    "mqd log verify on its directory shows where; if there are other replicas, delete this"
                    " replica: it is then copied again",
                )
            )
        elif sample.name == "mqd_sync_failures_total" and sample.value:
            findings.append(
                Finding(
                    Harm.LOSS,
                    f"{sample.value:.0f} flushes of worker {labels['worker']} failed since it started",
                    "dmesg and smartctl show the errors of the disk; move its partitions away (mqd cluster drain)",
                )
            )
        elif sample.name == "mqd_sync_oldest_seconds" and sample.value > FLUSH_S_MAX:
            findings.append(
                Finding(
                    Harm.OUTAGE,
                    f"a flush of worker {labels['worker']} has lasted {sample.value:.0f} s: its disk does not respond",
                    DISK_HANGS,
                )
            )
        elif sample.name == "mqd_partition_online" and not sample.value:
            findings.append(
                Finding(
                    Harm.OUTAGE,
                    f"{partition} is not served on this host",
                    f"{data_dir}/logs/mqd-worker-*.log names the cause",
                )
            )
        elif sample.name == "mqd_log_dir_free_bytes" and total_bytes.get(labels["directory"]):
            share = sample.value / total_bytes[labels["directory"]]
            if share < FREE_LOW:
                findings.append(
                    Finding(
                        Harm.OUTAGE if share < FREE_MIN else Harm.NO_RESERVE,
                        f"{labels['directory']} has {share:.0%} of its space left",
                        "mqd topic list shows the largest topics; shorten retention.ms, or add a directory to log.dirs",
                    )
                )
        elif sample.name == "mqd_certificate_expiry_timestamp_seconds" and sample.value - now_s < CERTIFICATE_S_MIN:
            remaining_s = sample.value - now_s
            findings.append(
                Finding(
                    Harm.OUTAGE if remaining_s < 0 else Harm.NO_RESERVE,
                    f"the certificate of {labels['listener']} "
                    + (f"expires in {remaining_s / DAY_S:.0f} days" if remaining_s > 0 else "has expired"),
                    "mqd cert renew, or put a new file in its place: it is read without a restart",
                )
            )
        elif sample.name == "mqd_compaction_uncleanable" and sample.value:
            findings.append(
                Finding(
                    Harm.NUISANCE,
                    f"{partition} cannot be compacted, and grows",
                    f"{data_dir}/logs/mqd-worker-*.log shows which record; mqd log verify shows the place",
                )
            )
        elif sample.name == "mqd_consumergroup_lag_seconds" and sample.value > LAG_S_MAX:
            key = (labels["consumergroup"], labels["topic"])
            behind[key] = max(behind.get(key, 0.0), sample.value)
    findings += [
        Finding(
            Harm.NUISANCE,
            f"group {group} is {seconds / 60:.0f} min behind in {topic}",
            f"mqd group describe {group}: if one partition lags, its member is stuck; if all lag, there are too few"
            " members",
        )
        for (group, topic), seconds in sorted(behind.items())
    ]
    return findings


def watermarks_waiting_for_flush(samples: Iterable[Sample], unreplicated: frozenset[str]) -> dict[str, float]:
    """Returns the high watermarks of those partitions in `unreplicated` that have records above it."""
    offsets_by_partition: dict[str, dict[str, float]] = {}
    for sample in samples:
        if sample.name in (_END, _HIGH_WATERMARK):
            offsets_by_partition.setdefault(f"{sample.labels['topic']}-{sample.labels['partition']}", {})[
                sample.name
            ] = sample.value
    return {
        name: offsets[_HIGH_WATERMARK]
        for name, offsets in offsets_by_partition.items()
        if name in unreplicated and len(offsets) == 2 and offsets[_HIGH_WATERMARK] < offsets[_END]
    }


def flush_findings(before: Iterable[Sample], after: Iterable[Sample], unreplicated: frozenset[str]) -> list[Finding]:
    """Reports flushes that hang. `before`, `after`: two scrapes of the metrics page,
    FLUSH_SAMPLE_GAP_S apart. `unreplicated`: partitions with one replica, whose records wait only
    for this host's disk.
    """
    watermarks_before = watermarks_waiting_for_flush(before, unreplicated)
    stuck = [
        name
        for name, high in watermarks_waiting_for_flush(after, unreplicated).items()
        if watermarks_before.get(name) == high
    ]
    if not stuck:
        return []
    return [
        Finding(
            Harm.OUTAGE,
            f"the disk does not respond: records of {partitions_text(stuck)} have waited for a flush for"
            f" {FLUSH_SAMPLE_GAP_S:.0f} s or more",
            DISK_HANGS,
        )
    ]


def stalled_partitions(samples: Iterable[Sample]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """(group, topic, partition) -> (committed offset, lag in seconds), for groups that have members
    and are more than STALLED_S_MIN behind.
    """
    listed = list(samples)
    with_members = {
        sample.labels["consumergroup"]
        for sample in listed
        if sample.name == "kafka_consumergroup_members" and sample.value
    }
    offsets = {_key(sample): sample.value for sample in listed if sample.name == "kafka_consumergroup_current_offset"}
    return {
        _key(sample): (offsets[_key(sample)], sample.value)
        for sample in listed
        if sample.name == "mqd_consumergroup_lag_seconds"
        and sample.value > STALLED_S_MIN
        and sample.labels["consumergroup"] in with_members
        and _key(sample) in offsets
    }


def _key(sample: Sample) -> tuple[str, str, str]:
    return sample.labels["consumergroup"], sample.labels["topic"], sample.labels["partition"]


def consumer_findings(before: Iterable[Sample], after: Iterable[Sample]) -> list[Finding]:
    """Reports groups that make no progress. `before`, `after`: two scrapes of the metrics page,
    COMMIT_INTERVAL_S apart: a member that makes progress commits in between.
    """
    stalled_before, stalled_now = stalled_partitions(before), stalled_partitions(after)
    findings = []
    for (group, topic, partition), (offset, behind_s) in sorted(stalled_now.items()):
        if stalled_before.get((group, topic, partition), (None, 0))[0] != offset:
            continue
        findings.append(
            Finding(
                Harm.NUISANCE,
                f"group {group} has members but has not passed offset {offset:.0f} of {topic}-{partition}, whose"
                f" record has waited for {behind_s / 60:.0f} min: its member fails at that record, or hangs",
                f"show it: mqd consume {topic} --partition {partition} --offset {offset:.0f} --count 1; to skip"
                f" it, stop the group's members, then mqd group seek {group} {topic}:{partition} --shift-by 1"
                " --execute",
            )
        )
    return findings


def host_findings(facts: Mapping[str, Any]) -> list[Finding]:
    """`facts`: open_files (the acceptor's limit), transparent_hugepages, swappiness, shm_free (a
    fraction); unknown facts are missing.
    """
    findings = []
    if facts.get("open_files", OPEN_FILES_MIN) < OPEN_FILES_MIN:
        findings.append(
            Finding(
                Harm.NO_RESERVE,
                f"the acceptor may open {facts['open_files']} files, which limits its connections",
                "ulimit -n 100000 before mqd up, or LimitNOFILE=100000 in its unit",
            )
        )
    if facts.get("shm_free", 1.0) < FREE_LOW:
        findings.append(
            Finding(
                Harm.NO_RESERVE,
                f"/dev/shm has {facts['shm_free']:.0%} of its space left: a worker that dies may fail to restart",
                "mount -o remount,size=50% /dev/shm, or find what else fills it",
            )
        )
    if facts.get("transparent_hugepages") == "always":
        findings.append(
            Finding(
                Harm.NUISANCE,
                "transparent huge pages are always on: the kernel stalls processes while it creates them",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            )
        )
    if facts.get("swappiness", 0) > SWAPPINESS_MAX:
        findings.append(
            Finding(
                Harm.NUISANCE,
                f"vm.swappiness is {facts['swappiness']}: the broker's memory is swapped out for the page cache",
                "sysctl -w vm.swappiness=1",
            )
        )
    return findings
