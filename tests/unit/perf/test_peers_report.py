"""From samples to medians, history and tables: the best values, failures, missing measurements."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from perf import report as bench_report
from perf.peers import charts, command, plan, report, results, rows, targets
from perf.peers.apache_kafka import ApacheKafka
from perf.peers.mqd_broker import Mqd
from perf.peers.peer import Load
from perf.peers.plan import BASE, Step
from perf.peers.processes import CpuSeconds
from perf.peers.results import Failure, PeerFacts, Run, Sample
from perf.peers.three_brokers import KafkaCluster, MqdCluster

THROUGHPUT = Step(plan.THROUGHPUT)
HALF = Step(plan.LATENCY, share=0.5)
DURABLE = dataclasses.replace(BASE, durable=True)
MACHINE = {"cpu": "A CPU", "cores": 2, "kernel": "6.18"}


def produced(rate: float, cpu: float, pss: float = 100.0) -> dict[str, float]:
    return {"records_per_s": rate, "broker_cpu_s_per_million": cpu, "pss_mb": pss}


def line(samples: list[Sample], failures: list[Failure] = [], peers: list[PeerFacts] | None = None) -> str:  # noqa: B006
    facts = peers or [
        PeerFacts("mqd", "1", "s", "f", "librdkafka"),
        PeerFacts("Apache Kafka", "4.2.0", "s", "f", "librdkafka"),
        PeerFacts("NATS JetStream", skipped="no apt-get here"),
    ]
    return results.history_line(
        "2026-11-21T05:00:00", "0123456789abcdef", MACHINE, facts, samples, failures, {"rounds": 3}
    )


def run_of(samples: list[Sample], **more) -> Run:
    return Run(json.loads(line(samples, **more)))


SAMPLES = [
    Sample("mqd", THROUGHPUT, 0, produced(100.0, 2.0)),
    Sample("mqd", dataclasses.replace(THROUGHPUT, everyone=True), 1, produced(300.0, 4.0)),
    Sample("mqd", THROUGHPUT, 2, produced(200.0, 3.0)),
    Sample("Apache Kafka", THROUGHPUT, 0, produced(400.0, 12.0, 600.0)),
    Sample("mqd", HALF, 0, {"rate": 100.0, "reached": 100.0, "acknowledged_p99_us": 2500.0}),
    Sample("Apache Kafka", HALF, 0, {"rate": 200.0, "reached": 150.0, "acknowledged_p99_us": 2000.0}),
]


def test_values_of_a_producing_run() -> None:
    measured = {"records": 2_000_000, "seconds": 4.0, "client_cpu_seconds": 2.0}
    values = results.throughput_values(measured, CpuSeconds(6.0, 2.0, 4.0), BASE)
    assert values == {
        "records_per_s": 500_000,
        "mb_per_s": 512.0,
        "broker_cpu_s_per_million": 3.0,
        "broker_user_cpu_s_per_million": 1.0,
        "broker_system_cpu_s_per_million": 2.0,
        "broker_cores": 1.5,
        "client_cores": 0.5,
    }


def test_values_of_a_latency_run() -> None:
    measured = {
        "records": 1000,
        "rate": 100,
        "reached": 99.0,
        "seconds": 10.0,
        "client_cpu_seconds": 1.0,
        "acknowledged": {"count": 5, "p50_us": 1.0},
        "consumed": {"count": 5, "p99_us": 9.0},
    }
    values = results.latency_values(measured, CpuSeconds(0.5, 0.1, 0.4))
    assert values == {
        "broker_cpu_s_per_million": 500.0,
        "broker_user_cpu_s_per_million": 100.0,
        "broker_system_cpu_s_per_million": 400.0,
        "acknowledged_p50_us": 1.0,
        "consumed_p99_us": 9.0,
        "rate": 100,
        "reached": 99.0,
        "client_cores": 0.1,
    }


def test_a_rate_is_not_sustained_by_the_broker_or_by_its_reader() -> None:
    values = {"rate": 100, "reached": 99.0, "consumed_p50_us": 4e5}
    figures = ("acknowledged_p99_us", "consumed_p99_us")
    assert not any(results.is_saturated(values, figure) for figure in figures)
    assert all(results.is_saturated({**values, "reached": 96.0}, figure) for figure in figures)
    late = {**values, "consumed_p50_us": 6e5}
    assert [results.is_saturated(late, figure) for figure in figures] == [False, True]
    assert not results.is_saturated({"end_to_end_p50_us": 5.0}, "end_to_end_p50_us"), "a tool without a rate"


def test_rounds_become_median_and_spread_whatever_else_was_measured() -> None:
    run = run_of(SAMPLES)
    assert run.value("mqd", THROUGHPUT, "records_per_s") == {"median": 200.0, "min": 100.0, "max": 300.0, "count": 3}
    assert run.value("mqd", Step(plan.THROUGHPUT, DURABLE), "records_per_s") is None
    assert run.medians("Apache Kafka", THROUGHPUT)["pss_mb"] == 600.0
    assert run.loads(plan.THROUGHPUT, plan.NEUTRAL) == [BASE]


def test_the_best_value_of_a_row_is_bold() -> None:
    text = report.table(run_of(SAMPLES), rows.headline_rows(), "x")
    assert "| produce, no fsync | records/s | 200 | **400** |" in text
    assert "| broker CPU to produce, no fsync | CPU-s per million | **3** | 12 |" in text
    assert "start-up" not in text, "a row without a measurement is left out"


def test_user_and_system_time_are_shown_for_runs_that_have_them() -> None:
    assert "in user mode" not in report.page_blocks(run_of(SAMPLES))["peers-throughput"]
    parts = {"broker_user_cpu_s_per_million": 0.25, "broker_system_cpu_s_per_million": 0.5}
    newer = Sample("mqd", THROUGHPUT, 0, {**produced(100.0, 0.75), **parts})
    text = report.page_blocks(run_of([newer, SAMPLES[3]]))["peers-throughput"]
    assert f"| {BASE.label()} | of these in user mode | 0.25 | – |" in text
    assert f"| {BASE.label()} | of these in the kernel | 0.5 | – |" in text


def joined(text: str) -> str:
    """Without its line breaks."""
    return " ".join(text.split())


def test_a_rate_that_was_not_sustained_is_marked_and_never_best() -> None:
    text = report.table(run_of(SAMPLES), rows.headline_rows(), "x")
    assert "| p99 acknowledgement latency at half of the broker's maximum rate, no fsync | ms | **2.5** | 2* |" in text
    run = run_of(SAMPLES)
    assert "could not sustain" in joined(report.page_blocks(run)["peers-headline"])
    assert "could not sustain" not in joined(report.readme_block(run)), "of rows that are shown alone"


def test_the_load_generators_lateness_is_shown_and_never_best() -> None:
    values = {"rate": 100.0, "reached": 100.0, "late_p99_us": 1500.0}
    text = report.table(
        run_of([Sample(peer, HALF, 0, values) for peer in ("mqd", "Apache Kafka")]), rows.latency_rows([BASE]), "x"
    )
    assert (
        "| no fsync, 50% of the broker's maximum rate | ms by which records were sent late, p99 | 1.5 | 1.5 |" in text
    )


def test_spreads_of_clusters_have_a_table_of_their_own() -> None:
    replicated = Step(plan.THROUGHPUT, plan.REPLICATED)
    peers = [PeerFacts(name, "1", "s", "f", "librdkafka") for name in (Mqd.name, MqdCluster.name)]
    samples = [
        *SAMPLES[:3],
        *(Sample(MqdCluster.name, replicated, i, produced(r, 2.0)) for i, r in enumerate((90.0, 110.0))),
    ]
    alone, cluster = report.page_blocks(run_of(samples, peers=peers))["peers-spread"].split("\n\n")
    assert "| produce, no fsync | records/s | 100–300 (3) |" in alone and MqdCluster.name not in alone
    assert "| produce | records/s | 90–110 (2) |" in cluster
    assert "\n\n" not in report.page_blocks(run_of(SAMPLES))["peers-spread"], "without clusters"


def test_failures_and_unsupported_cases_are_distinguished() -> None:
    run = run_of(SAMPLES[:3], failures=[Failure("Apache Kafka", THROUGHPUT, 0, "it ended")])
    assert "| produce, no fsync | records/s | 200 | failed |" in report.table(run, rows.headline_rows(), "x")
    assert run.failure("Apache Kafka", THROUGHPUT) == "it ended"
    assert "| produce, no fsync | records/s | 200 | – |" in report.table(
        run_of([*SAMPLES[:3], SAMPLES[5]]), rows.headline_rows(), "x"
    )
    assert report.table(run_of(SAMPLES[:3]), rows.headline_rows(), "x").startswith("| x |  | mqd |\n"), (
        "a peer of which there is nothing has no column"
    )


def test_an_unavailable_peer_is_named_with_the_reason() -> None:
    block = joined(report.readme_block(run_of(SAMPLES)))
    assert "NATS JetStream: not measured: no apt-get here." in block
    assert "mqd 1, Apache Kafka 4.2.0" in block and "3 rounds" in block


def test_a_cluster_of_a_measured_program_is_not_another_version() -> None:
    names = [Mqd.name, MqdCluster.name, ApacheKafka.name, KafkaCluster.name]
    run = run_of(SAMPLES, peers=[PeerFacts(name, "1", "s", "f", "librdkafka") for name in names])
    assert report.versions_text(run) == "mqd 1, Apache Kafka 1"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rounds": 0}, "part of a round"),
        ({"rounds": 1}, "1 round,"),
        ({"rounds": 2, "busy_before": 0.37}, "Other programs used 37% of the CPUs"),
    ],
)
def test_a_truncated_or_disturbed_run_is_marked(how: dict, message: str) -> None:
    run = run_of(SAMPLES)
    run.line["run"] = how
    assert message in joined(report.head_text(run))
    assert ("Other programs" in report.head_text(run)) == ("busy_before" in how)


def test_targets_are_reported_as_multiples_of_a_peer() -> None:
    lines = targets.target_lines(run_of(SAMPLES))
    cpu = next(found for found in lines if found[0].startswith("broker CPU to produce, no fsync"))
    assert cpu == (
        "broker CPU to produce, no fsync, CPU-s per million",
        "3",
        "Apache Kafka: 12",
        "0.25",
        "≤ 0.25",
        "reached",
    )
    assert (
        "memory after load, all processes, MB (PSS)",
        "100",
        "Apache Kafka: 600",
        "0.167",
        "≤ 0.25",
        "reached",
    ) in lines
    assert next(found for found in lines if found[0].startswith("produce, no fsync"))[-2:] == ("≥ 1", "missed")


def test_half_of_the_best_other_peer_leaves_kafka_aside() -> None:
    others = [PeerFacts("mqd"), PeerFacts("Apache Kafka"), PeerFacts("Redis Streams")]
    run = run_of([*SAMPLES, Sample("Redis Streams", THROUGHPUT, 0, produced(500.0, 5.0))], peers=others)
    cpu = [found for found in targets.target_lines(run) if found[0].startswith("broker CPU to produce, no fsync")]
    assert [found[2] for found in cpu] == ["Apache Kafka: 12", "Redis Streams: 5"]
    assert cpu[1][-1] == "missed"
    assert (
        next(found for found in targets.target_lines(run) if found[0].startswith("produce, no fsync"))[2]
        == "Redis Streams: 500"
    ), "throughput is held against every peer"


def _costs(load: Load, peer: str, produced: float, read: float) -> Sample:
    values = {"broker_cpu_s_per_million": produced, "consume_broker_cpu_s_per_million": read}
    return Sample(peer, Step(plan.THROUGHPUT, load), 0, values)


def test_cpu_is_compared_at_every_load_and_its_extremes_are_shown() -> None:
    loads = [BASE, DURABLE, dataclasses.replace(BASE, acks="1")]
    samples = [_costs(load, "Apache Kafka", 10.0, 1.0) for load in loads]
    samples += [_costs(load, "mqd", cost, 0.2) for load, cost in zip(loads, (2.0, 4.0, 3.0), strict=True)]
    found = {line[0]: line[1:] for line in targets.target_lines(run_of(samples)) if "among 3 loads" in line[0]}
    assert found == {
        f"broker CPU to produce, lowest ratio among 3 loads: {BASE.label()}, CPU-s per million": (
            *("2", "Apache Kafka: 10", "0.2", "≤ 0.25", ""),
        ),
        f"broker CPU to produce, highest ratio among 3 loads: {DURABLE.label()}, CPU-s per million": (
            *("4", "Apache Kafka: 10", "0.4", "≤ 0.25", "missed at 2 of 3"),
        ),
        f"broker CPU to read, lowest ratio among 3 loads: {loads[2].label()}, CPU-s per million": (
            *("0.2", "Apache Kafka: 1", "0.2", "≤ 0.25", ""),
        ),
        f"broker CPU to read, highest ratio among 3 loads: {BASE.label()}, CPU-s per million": (
            *("0.2", "Apache Kafka: 1", "0.2", "≤ 0.25", "reached"),
        ),
    }


@pytest.mark.parametrize(
    ("p99", "p999", "reached", "verdict"),
    [(2_000.0, 6_000.0, 100.0, "reached"), (2_000.0, 6_100.0, 100.0, "missed"), (9e5, 1e6, 90.0, "missed")],
)
def test_the_tail_is_a_multiple_of_the_own_p99(p99: float, p999: float, reached: float, verdict: str) -> None:
    values = {"rate": 100.0, "reached": reached, "acknowledged_p99_us": p99, "acknowledged_p999_us": p999}
    (line,) = targets.target_lines(run_of([Sample("mqd", HALF, 0, values)]))
    assert line[0] == "p99.9 acknowledgement latency at half of mqd's maximum rate, no fsync, ms"
    assert line[-2:] == ("≤ 3", verdict), "a rate that was not sustained reaches nothing"


def test_three_replicas_are_judged_at_the_lowest_rate_that_is_hard_for_kafka() -> None:
    samples = [
        Sample(peer, Step(plan.LATENCY, plan.REPLICATED, rate=rate), 0, {"acknowledged_p99_us": p99})
        for peer, tails in (("mqd, 3 brokers", (2e3, 3.5e3, 9e3)), ("Apache Kafka, 3 brokers", (4.9e3, 5e3, 8e4)))
        for rate, p99 in zip(plan.RATES, tails, strict=True)
    ]
    (line,) = targets.target_lines(run_of(samples))
    assert "at 100,000 records/s (the lowest rate at which Kafka's p99 is ≥ 5 ms), mqd, 3 brokers, ms" in line[0]
    assert line[1:] == ("3.5", "Apache Kafka, 3 brokers: 5", "0.7", "≤ 3 ms", "missed")
    assert targets.target_lines(run_of(samples[:1] + samples[3:4])) == [], "at no measured rate"


def test_the_plain_table_lines_up() -> None:
    lines = report.table(run_of(SAMPLES), rows.headline_rows(), "what", markdown=False).splitlines()
    assert lines[0].split() == ["what", "mqd", "Apache", "Kafka"]
    assert "**" not in "\n".join(lines)
    assert len({len(found) for found in lines[1:2]}) == 1


def test_history_distinguishes_kinds_of_lines(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    own = json.dumps({"date": "d", "figures": {}})
    history.write_text(own + "\n" + line(SAMPLES) + "\n")
    assert bench_report.last_run(history) == json.loads(own)
    assert results.last_run(history)["kind"] == "peers"
    history.write_text(own + "\n")
    with pytest.raises(ValueError, match="make bench-peers"):
        results.last_run(history)
    history.write_text(line(SAMPLES))
    with pytest.raises(ValueError, match="run `make bench` first"):
        bench_report.last_run(history)


def test_pages_have_the_marks_that_the_comparison_fills() -> None:
    page = command.PAGE.read_text()
    for name in report.page_blocks(run_of(SAMPLES)):
        page = bench_report.replace_block(page, name, "")
    bench_report.replace_block(command.README.read_text(), "peers", "")


def test_pages_are_filled_from_the_last_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(SAMPLES)
    marks = "".join(f"<!-- {name}:begin --><!-- {name}:end -->\n" for name in [*report.page_blocks(run), "peers"])
    for name in ("HISTORY", "README", "PAGE"):
        monkeypatch.setattr(command, name, tmp_path / name)
        (tmp_path / name).write_text(line(SAMPLES) + "\n" if name == "HISTORY" else marks)
    monkeypatch.setattr(charts, "draw", lambda run, directory: [report.THROUGHPUT_CHART])
    assert command.main(["--pages"]) == 0
    page = (tmp_path / "PAGE").read_text()
    assert "![Throughput and broker CPU of every peer at every load](images/peers-throughput.png)" in page
    assert "peers-latency.png" not in page, "what was not drawn is not shown"
    assert "| produce, no fsync | records/s |" in (tmp_path / "README").read_text()


def test_without_matplotlib_the_tables_are_still_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def missing(run: Run, directory: Path) -> list[str]:
        raise ImportError("matplotlib")

    run = run_of(SAMPLES)
    marks = "".join(f"<!-- {name}:begin --><!-- {name}:end -->\n" for name in [*report.page_blocks(run), "peers"])
    for name in ("README", "PAGE"):
        monkeypatch.setattr(command, name, tmp_path / name)
        (tmp_path / name).write_text(marks)
    monkeypatch.setattr(charts, "draw", missing)
    command.fill_pages(run)
    assert "**400**" in (tmp_path / "README").read_text()
    assert "images/" not in (tmp_path / "PAGE").read_text()
    assert "No charts: matplotlib" in capsys.readouterr().err


def test_charts_leave_out_missing_measurements() -> None:
    fixed = [
        Sample(sample.peer, Step(plan.LATENCY, rate=10_000), 0, sample.values)
        for sample in SAMPLES
        if sample.step == HALF
    ]
    run = run_of([*SAMPLES, *fixed])
    assert charts.bars(run, [BASE, DURABLE], "records_per_s") == {"mqd": [200.0, None], "Apache Kafka": [400.0, None]}
    cpu = charts.bars(run, [BASE], "broker_cpu_s_per_million", charts.cpu_per_gb)
    assert cpu["mqd"] == [pytest.approx(3.0 / 1.024)], "3 CPU-seconds for a million records, which are 1.024 GB"
    assert charts.latency_points(run, BASE, "acknowledged_p99_us") == {
        "mqd": [(0.1, 2.5, True)],
        "Apache Kafka": [(0.2, 2.0, False)],
    }
    assert [
        charts.axis_label(load) for load in (BASE, DURABLE, dataclasses.replace(BASE, record_bytes=100, acks="1"))
    ] == ["1 KiB (base)", "fsync", "100 B acks=1"]
