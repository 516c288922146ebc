"""Every alert with promtool: values that make it fire, and values just below. Also a panel's query."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from mqd.monitoring import dashboards
from mqd.monitoring.alerts import ALERTS, render_rules
from tests.interaction.monitoring.prometheus import find

PAGE = Path(__file__).parents[3] / "docs" / "monitoring.md"
AFTER_MINUTES = 70  # longer than the `for` of any alert, and than any range but the disk's


class Case(NamedTuple):
    """Series by name with their values, one a minute, in promtool's notation."""

    fires: dict[str, str]
    quiet: dict[str, str]


def both(series: str, fires: str, quiet: str) -> Case:
    return Case({series: fires}, {series: quiet})


def latency(metric: str, slow: str, fast: str) -> Case:
    """A hundred requests a minute, all in the bucket `slow` or `fast`."""

    def buckets(at: str) -> dict[str, str]:
        bounds = sorted({slow, fast, "+Inf"}, key=float)
        return {
            f'{metric}_bucket{{instance="a",worker="0",le="{bound}"}}': (
                "0+100x80" if float(bound) >= float(at) else "0x80"
            )
            for bound in bounds
        }

    return Case(buckets(slow), buckets(fast))


_GROUP = 'consumergroup="g",instance="a"'
_OTHER_GROUP = 'consumergroup="g",instance="c",cluster="other"'
CASES = {
    "MqdBrokerDown": both('up{job="mqd",instance="a"}', "0x80", "1x80"),
    "MqdWorkerDown": both('mqd_worker_running{worker="1"}', "0x80", "1x80"),
    "MqdProcessKeepsDying": both('mqd_process_deaths_total{process="worker-0"}', "0x65 1 2 3 4x20", "0x65 1x20"),
    "MqdPartitionsWithoutLeader": both('mqd_cluster_partitions_without_leader{instance="a"}', "1x80", "0x80"),
    "MqdPartitionOffline": both('mqd_partition_online{topic="t",partition="0",instance="a"}', "0x80", "1x80"),
    "MqdUnderMinInSync": both("mqd_partitions_under_min_in_sync", "2x80", "0x80"),
    "MqdUnderReplicated": both("mqd_partitions_under_replicated", "2x80", "0x68 2x20"),
    "MqdInSyncSetsFlap": both("mqd_in_sync_shrinks_total", "0+2x80", "0+1x80"),
    "MqdNoActiveController": Case(
        {'mqd_cluster_active_controller{instance="a"}': "0x80", 'mqd_cluster_active_controller{instance="b"}': "0x80"},
        {
            'mqd_cluster_active_controller{instance="a"}': "0x80",
            'mqd_cluster_active_controller{instance="b"}': "1x80",
            'mqd_cluster_active_controller{instance="c",cluster="other"}': "1x80",
        },
    ),
    "MqdBrokerFenced": both('mqd_cluster_brokers{state="fenced"}', "1x80", "0x80"),
    "MqdUncleanElection": both("mqd_unclean_leader_elections_total", "0x65 1x20", "1x80"),
    "MqdFlushFailed": both("mqd_sync_failures_total", "0x67 1x20", "1x80"),
    "MqdFlushHangs": both('mqd_sync_oldest_seconds{worker="0"}', "21x80", "19x80"),
    "MqdCorruptSegment": both('mqd_corrupt_segments{topic="t",partition="0"}', "1x80", "0x80"),
    "MqdDiskNearlyFull": Case(
        {'mqd_log_dir_free_bytes{directory="/d"}': "9x80", 'mqd_log_dir_total_bytes{directory="/d"}': "100x80"},
        {'mqd_log_dir_free_bytes{directory="/d"}': "11x80", 'mqd_log_dir_total_bytes{directory="/d"}': "100x80"},
    ),
    "MqdDiskFullWithinADay": Case(
        {
            'mqd_log_dir_free_bytes{directory="/d"}': "39000-100x80",
            'mqd_log_dir_total_bytes{directory="/d"}': "100000x80",
        },
        {
            'mqd_log_dir_free_bytes{directory="/d"}': "39000-1x80",
            'mqd_log_dir_total_bytes{directory="/d"}': "100000x80",
        },
    ),
    "MqdFlushesAreSlow": latency("mqd_sync_seconds", "1", "0.25"),
    "MqdProduceIsSlow": latency("mqd_produce_seconds", "2", "0.5"),
    "MqdWorkerStalls": latency("mqd_loop_seconds", "0.5", "0.05"),
    "MqdConsumerBehind": both(f'mqd_consumergroup_lag_seconds{{topic="t",partition="0",{_GROUP}}}', "700x80", "500x80"),
    "MqdConsumerStuck": Case(
        {
            f'kafka_consumergroup_lag{{topic="t",partition="0",{_GROUP}}}': "5x80",
            f'kafka_consumergroup_current_offset{{topic="t",partition="0",{_GROUP}}}': "7x80",
            f"kafka_consumergroup_members{{{_GROUP}}}": "1x80",
        },
        {
            f'kafka_consumergroup_lag{{topic="t",partition="0",{_GROUP}}}': "5x80",
            f'kafka_consumergroup_current_offset{{topic="t",partition="0",{_GROUP}}}': "7+1x80",
            f"kafka_consumergroup_members{{{_GROUP}}}": "1x80",
            # a group of the same name in another cluster is stopped
            f'kafka_consumergroup_lag{{topic="t",partition="0",{_OTHER_GROUP}}}': "5x80",
            f'kafka_consumergroup_current_offset{{topic="t",partition="0",{_OTHER_GROUP}}}': "7x80",
            f"kafka_consumergroup_members{{{_OTHER_GROUP}}}": "0x80",
        },
    ),
    "MqdDeadLettersWait": both('mqd_dead_letters_oldest_seconds{group="g",instance="a"}', "310x80", "290x80"),
    "MqdDeadLettersWritten": both('mqd_dead_letters_total{group="g",instance="a"}', "7x60 8x20", "8x80"),
    "MqdPartitionStuck": Case(
        {
            f'kafka_consumergroup_lag{{topic="t",partition="0",{_GROUP}}}': "5x80",
            f'kafka_consumergroup_lag{{topic="t",partition="1",{_GROUP}}}': "5x80",
            f'kafka_consumergroup_current_offset{{topic="t",partition="0",{_GROUP}}}': "7x80",
            f'kafka_consumergroup_current_offset{{topic="t",partition="1",{_GROUP}}}': "7+2x160",
            f'kafka_consumergroup_current_offset{{topic="t",partition="2",{_GROUP}}}': "7+2x160",
        },
        # all stop consuming; a consumer that commits every 10 minutes. A group of the same name in
        # another cluster advances.
        {
            f'kafka_consumergroup_lag{{topic="t",partition="0",{_GROUP}}}': "5x80",
            f'kafka_consumergroup_lag{{topic="t",partition="1",{_GROUP}}}': "5x80",
            f'kafka_consumergroup_current_offset{{topic="t",partition="0",{_GROUP}}}': "7x80",
            f'kafka_consumergroup_current_offset{{topic="t",partition="1",{_GROUP}}}': "7x80",
            f'kafka_consumergroup_current_offset{{topic="t",partition="1",{_OTHER_GROUP}}}': "7+2x160",
            f'kafka_consumergroup_current_offset{{topic="t",partition="2",{_OTHER_GROUP}}}': "7+2x160",
        },
    ),
    "MqdRebalanceStuck": both(f"mqd_consumergroup_rebalance_seconds{{{_GROUP}}}", "130x80", "100x80"),
    "MqdGroupMemoryNearlyFull": Case(
        {"mqd_group_memory_bytes": "95x80", "mqd_group_memory_max_bytes": "100x80"},
        {"mqd_group_memory_bytes": "85x80", "mqd_group_memory_max_bytes": "100x80"},
    ),
    "MqdConnectionsRefused": both("mqd_connections_refused_total", "0+1x80", "5x80"),
    "MqdAuthenticationFails": Case(
        {'mqd_authentications_total{result="failed"}': "0+120x80"},
        {'mqd_authentications_total{result="failed"}': "0+6x80", 'mqd_authentications_total{result="ok"}': "0+900x80"},
    ),
    "MqdCertificateExpires": both(
        'mqd_certificate_expiry_timestamp_seconds{listener="SSL"}', "1000000x80", f"{15 * 86400 + 60 * 80}x80"
    ),
    "MqdClockSkew": both('mqd_clock_timestamp_seconds{instance="a"}', "30+60x80", "5+60x80"),
    "MqdCompactionStuck": both('mqd_compaction_uncleanable{topic="t",partition="0"}', "1x80", "0x80"),
}


def run_tests(promtool: str, directory: Path, files: list[str]) -> None:
    done = subprocess.run(
        [promtool, "test", "rules", *files], cwd=directory, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_its_case_and_its_section() -> None:
    assert [one.name for one in ALERTS] == list(CASES)
    sections = re.findall(r"^### (Mqd\w+)$", PAGE.read_text(), re.MULTILINE)
    assert sections == list(CASES)


def test_each_alert_fires_and_is_quiet(tmp_path: Path) -> None:
    promtool = find("promtool")
    for one in ALERTS:
        (tmp_path / f"{one.name}.rules").write_text(render_rules("https://example.org/monitoring", [one]))
        firing = f'count(ALERTS{{alertname="{one.name}",alertstate="firing"}}) or vector(0)'
        case = CASES[one.name]
        tests = [
            {
                "name": f"{one.name} {'fires' if count else 'is quiet'}",
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": firing,
                        "eval_time": f"{AFTER_MINUTES}m",
                        "exp_samples": [{"labels": "{}", "value": count}],
                    }
                ],
            }
            for series, count in ((case.fires, 1), (case.quiet, 0))
        ]
        (tmp_path / f"{one.name}.yml").write_text(  # JSON is YAML
            json.dumps({"rule_files": [f"{one.name}.rules"], "evaluation_interval": "1m", "tests": tests})
        )
    run_tests(promtool, tmp_path, [f"{one.name}.yml" for one in ALERTS])


def test_a_record_is_counted_once_for_all_replicas(tmp_path: Path) -> None:
    promtool = find("promtool")
    query = dict(dashboards.all_queries())["mqd: a topic: Records appended"]
    end = "mqd_partition_log_end_offset"
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f'{end}{{topic="t",partition="0",instance="{host}"}}', "values": "0+60x10"} for host in "abc"
        ],
        "promql_expr_test": [
            {
                "expr": query.replace("$topic", "t").replace("$__rate_interval", "5m"),
                "eval_time": "10m",
                "exp_samples": [{"labels": '{partition="0"}', "value": 1}],
            }
        ],
    }
    (tmp_path / "panel.yml").write_text(json.dumps({"rule_files": [], "tests": [test]}))
    run_tests(promtool, tmp_path, ["panel.yml"])


@pytest.mark.parametrize(
    "options",
    [[], ["--target", "a:9644", "--target", "b:9644", "--ca", "ca", "--token-file", "t", "--cluster", 'it\'s "a"']],
)
def test_the_files_have_prometheus_format(tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from mqd.cli.main import cli

    promtool = find("promtool")
    monkeypatch.chdir(tmp_path)
    for name in ("ca", "t"):
        (tmp_path / name).write_text("")
    done = CliRunner().invoke(cli, ["monitoring", "out", *options])
    assert done.exit_code == 0, done.output
    checked = subprocess.run(
        [promtool, "check", "config", "out/prometheus.yml"], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout
