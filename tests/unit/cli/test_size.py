"""`mqd size`: examples calculated by hand, units, and properties of the arithmetic."""

import json
import math

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqd.cli import main as main_module
from mqd.cli import sizing
from mqd.cli.common import EXIT_FAILED, EXIT_USAGE
from mqd.cli.sizing import Figures, Host, Load, plan, shipped_figures
from mqd.cli.verbs import size

WEEK = 7 * 86400.0
FIGURES = Figures(
    source="made up",
    date="2026-01-01",
    append_cpu_us={1000: 10.0, 11000: 110.0},
    forward_cpu_us={1000: 1.0},
    fetch_cpu_us={65536: 20.0},
    broker_memory_bytes=100_000_000,
    worker_memory_bytes=50_000_000,
    contention=0.0,
    coherency=0.0,
    workers_measured=2,
)


def requested(**changes) -> Load:
    return Load(**{"rate": 100_000, "record_bytes": 1000, "retention_s": WEEK, **changes})


def test_a_hundred_thousand_a_second_for_a_week_three_times():
    """100 k records/s of 1 KB: 8.64 TB a day, 60.48 TB a week; halved by compression, three copies:
    90.72 TB.
    """
    plain = plan(requested(), Host(), shipped_figures())
    assert plain["stored_per_day"] == pytest.approx(8.64e12)
    assert plain["stored"] == pytest.approx(60.48e12)
    small = plan(requested(compression=0.5, replication=3), Host(), shipped_figures())
    assert small["stored"] == pytest.approx(30.24e12)
    assert small["stored_replicated"] == pytest.approx(90.72e12)
    assert plan(requested(replication=3), Host(), shipped_figures())["stored_replicated"] == pytest.approx(181.44e12)
    # on disk: framing 1 %, batch headers, indexes, one more segment of each partition, and 30 %
    # free
    assert small["disk_used"] == pytest.approx(90.72e12, rel=0.025) and small["disk_used"] > 90.72e12
    assert small["disk"] == pytest.approx(small["disk_used"] / 0.7)


def test_the_example_on_the_command_line(capsys):
    words = [
        "size",
        "--rate",
        "100k",
        "--record-size",
        "1KB",
        "--retention",
        "7d",
        "--replication",
        "3",
        "--compression",
        "50%",
    ]
    assert main_module._run(words) == 0
    text = capsys.readouterr().out
    assert "30.24 TB" in text and "90.72 TB" in text
    assert main_module._run([*words, "--format", "json"]) == 0
    response = json.loads(capsys.readouterr().out)
    assert main_module._run(["--format", "json", *words]) == 0
    assert json.loads(capsys.readouterr().out) == response
    assert response["result"]["stored_replicated"] == pytest.approx(90.72e12)
    assert (
        response["load"]["rate"] == 100_000 and response["load"]["failures"] is None and response["figures"]["source"]
    )
    assert set(response["units"]) == set(response["result"])


def test_every_number_by_hand():
    """10,000/s of 990 B in batches of 10 (with framing 10,061 B), two copies, three readers, one of
    which reads old records.
    """
    load = requested(
        rate=10_000,
        record_bytes=990,
        retention_s=86400,
        replication=2,
        consumers=3,
        cold_consumers=1,
        batch_bytes=9_900,
        partitions=4,
        segment_bytes=10**9,
        headroom=0.5,
        failures=0,
    )
    found = plan(
        load, Host(cores=2, memory_bytes=64e9, disk_bytes=10e12, disk_bytes_per_s=1e9, network_bytes_per_s=1e9), FIGURES
    )
    log = 1000 * 10_061
    assert (found["records_per_batch"], found["batches"], found["batch"], found["log"]) == (10, 1000, 10_061, log)
    assert found["batch_fill"] == pytest.approx(10 * 4 / 10_000)
    index = log * 20 / 10_061
    assert found["index"] == pytest.approx(index)
    assert found["expiring_segments"] == 4 * 10**9
    assert found["disk_used"] == pytest.approx(2 * ((log + index) * 86400 + 4e9))
    assert found["disk"] == pytest.approx(2 * found["disk_used"])
    assert found["disk_write"] == pytest.approx(2 * (log + index)) and found["disk_read"] == log
    assert found["network_in"] == pytest.approx(1.05 * 2 * log) and found["network_out"] == pytest.approx(
        1.05 * 4 * log
    )
    assert found["cores_appending"] == pytest.approx(1000 * 100.61e-6 * 2)
    assert found["cores_forwarding"] == pytest.approx(1000 * 1e-6)
    assert found["cores_fetching"] == pytest.approx(log * 4 / 65536 * 20e-6)
    assert found["cores"] == pytest.approx(
        2 * (found["cores_appending"] + found["cores_forwarding"] + found["cores_fetching"])
    )
    assert found["hosts"] == 2 and found.decided_by == "replication"
    assert found["workers_per_host"] == 1
    assert found["memory_per_host"] == pytest.approx((100e6 + 50e6 + 2 * log * 60 / 2) / 0.5)


def test_each_resource_can_decide():
    """Each case has one thing in short supply."""
    cases = {
        "disk": Host(disk_bytes=1e12),
        "disk bandwidth": Host(disk_bytes=1e18, disk_bytes_per_s=20e6),
        "network in": Host(disk_bytes=1e18, network_bytes_per_s=20e6),
        "cores": Host(cores=1, disk_bytes=1e18),
        "memory": Host(disk_bytes=1e18, memory_bytes=4e9),
    }
    for name, host in cases.items():
        load = requested(consumers=0) if name != "cores" else requested(batch_bytes=1000, rate=1_000_000, lag_s=1)
        host = (
            host if name != "cores" else Host(cores=1, disk_bytes=1e18, disk_bytes_per_s=1e12, network_bytes_per_s=1e12)
        )
        found = plan(load, host, FIGURES)
        assert found.decided_by == name, (name, found.hosts_by_resource)
        assert found["hosts"] == found.hosts_by_resource[name] > 1
    assert (
        plan(requested(consumers=9), Host(disk_bytes=1e18, network_bytes_per_s=100e6), FIGURES).decided_by
        == "network out"
    )


def test_with_replicas_one_host_may_fail():
    host = Host(disk_bytes=20e12)
    one = plan(requested(), host, FIGURES)
    three = plan(requested(replication=3, failures=0), host, FIGURES)
    spare = plan(requested(replication=3), host, FIGURES)
    assert one["hosts"] == math.ceil(one["disk"] / 20e12)
    assert spare["hosts"] == three["hosts"] + 1
    assert spare["disk_per_host"] == pytest.approx(three["disk_per_host"]) and spare["disk_per_host"] <= 20e12
    assert plan(requested(rate=10, replication=3), host, FIGURES)["hosts"] == 3  # two of three carry the load


def test_cost_is_piecewise_linear():
    points = {100: 2.0, 1000: 2.9, 10_000: 20.9}
    assert [sizing.cost(points, at) for at in (1, 100, 550, 1000, 5500, 10_000, 20_000)] == pytest.approx(
        [2.0, 2.0, 2.45, 2.9, 11.9, 20.9, 40.9]
    )
    assert sizing.cost({5: 7.0}, 10**6) == 7.0
    assert sizing.cost({100: 2.0, 200: 1.0}, 10**6) == 0.0  # a falling slope does not become negative cost


def test_workers_follow_the_scalability_law():
    figures = Figures(
        **{**{name: getattr(FIGURES, name) for name in FIGURES.__struct_fields__}, "contention": 0.1, "coherency": 0.01}
    )
    assert sizing.speedup(figures, 1) == 1
    assert sizing.speedup(figures, 4) == pytest.approx(4 / (1 + 0.3 + 0.12))
    assert sizing.fewest_workers(figures, 2.5, 16) == 4
    assert sizing.fewest_workers(figures, 5.0, 64) is None  # beyond the maximum, more workers do less
    many = plan(
        requested(rate=10_000_000, batch_bytes=1000, lag_s=0.001),
        Host(disk_bytes=1e18, disk_bytes_per_s=1e15, network_bytes_per_s=1e15, memory_bytes=1e12),
        figures,
    )
    assert many.decided_by == "cores" and any("extrapolated" in note for note in many.notes)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (size.RATE, "100k", 1e5),
        (size.RATE, "1.5M/s", 1.5e6),
        (size.RATE, "100,000", 1e5),
        (size.BYTES, "1KB", 1000),
        (size.BYTES, "1KiB", 1024),
        (size.BYTES, "20 TB", 20e12),
        (size.BYTES, "100", 100),
        (size.BYTES, "1GB/s", 1e9),
        (size.TIME, "7d", WEEK),
        (size.TIME, "2w", 2 * WEEK),
        (size.TIME, "90min", 5400),
        (size.TIME, "90m", 5400),
        (size.TIME, "250ms", 0.25),
        (size.NETWORK, "10Gbit", 1.25e9),
        (size.NETWORK, "25Gbit/s", 3.125e9),
        (size.NETWORK, "1.25GB", 1.25e9),
        (size.SHARE, "30%", 0.3),
        (size.SHARE, "0.3", 0.3),
        (size.RATIO, "2x", 0.5),
        (size.RATIO, "50%", 0.5),
        (size.RATIO, "0.5", 0.5),
        (size.RATIO, "1", 1.0),
    ],
)
def test_units(kind, text, value):
    assert kind.convert(text, None, None) == pytest.approx(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (size.RATE, "fast"),
        (size.BYTES, "1 XB"),
        (size.BYTES, "-1KB"),
        (size.TIME, "7"),
        (size.NETWORK, "10G"),
        (size.RATIO, "0x"),
        (size.SHARE, "half"),
    ],
)
def test_invalid_quantities_are_refused_with_an_example(kind, text):
    with pytest.raises(click.UsageError, match="such as"):
        kind.convert(text, None, None)


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--rate", "0", "--record-size", "1KB", "--retention", "7d"], EXIT_FAILED, "--rate must be above 0"),
        (["--rate", "1k", "--record-size", "1KB", "--retention", "7d", "--headroom", "100%"], EXIT_FAILED, "headroom"),
        (
            ["--rate", "1k", "--record-size", "1KB", "--retention", "7d", "--cold-consumers", "2"],
            EXIT_FAILED,
            "consumers (1), not 2",
        ),
        (
            ["--rate", "1k", "--record-size", "1KB", "--retention", "7d", "--host-memory", "100MB"],
            EXIT_FAILED,
            "increase --host-memory",
        ),
        (["--rate", "1k", "--record-size", "1KB", "--retention", "7"], EXIT_USAGE, "such as 90s"),
        (["--record-size", "1KB", "--retention", "7d"], EXIT_USAGE, "--rate"),
    ],
)
def test_refusals_name_the_limiting_setting(words, code, part, capsys):
    assert main_module._run(["size", *words]) == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and part in captured.err and not captured.out


def test_formulas_and_figures_can_be_seen_and_replaced(capsys, tmp_path):
    words = ["size", "--rate", "1M", "--record-size", "100", "--retention", "1d"]
    assert main_module._run([*words, "--formulas", "--append-cost", "50", "--forward-cost", "0"]) == 0
    text = capsys.readouterr().out
    assert "batches × 50 µs × replication" in text and "rate × record size × compression × 86,400 s" in text
    other = tmp_path / "figures.json"
    other.write_text(sizing.SHIPPED_FIGURES.read_text().replace('"contention"', '"contended"'))
    assert main_module._run([*words, "--figures", str(other)]) == EXIT_FAILED
    assert "contended" in capsys.readouterr().err
    other.write_text(sizing.SHIPPED_FIGURES.read_text())
    assert main_module._run([*words, "--figures", str(other)]) == 0


@given(
    rate=st.floats(1, 1e7),
    record_bytes=st.floats(1, 1e6),
    retention=st.floats(1, 1e8),
    copies=st.integers(1, 5),
    compression=st.floats(0.01, 1),
    consumers=st.integers(0, 20),
    headroom=st.floats(0, 0.9),
    more=st.floats(1, 10),
)
def test_plans_fit_and_grow_with_the_load(
    rate, record_bytes, retention, copies, compression, consumers, headroom, more
):
    load = requested(
        rate=rate,
        record_bytes=record_bytes,
        retention_s=retention,
        replication=copies,
        compression=compression,
        consumers=consumers,
        headroom=headroom,
    )
    host = Host(memory_bytes=256e9)
    found = plan(load, host, shipped_figures())
    carrying = max(1, found["hosts"] - (copies > 1))
    assert found["hosts"] >= copies
    assert found["disk"] <= carrying * host.disk_bytes * (1 + 1e-6)
    for name in ("network_in", "network_out"):
        assert found[name] / (1 - headroom) <= carrying * host.network_bytes_per_s * (1 + 1e-6)
    assert (found["disk_write"] + found["disk_read"]) / (1 - headroom) <= carrying * host.disk_bytes_per_s * (1 + 1e-6)
    assert found["memory_per_host"] <= host.memory_bytes * (1 + 1e-6)
    assert sizing.speedup(shipped_figures(), int(found["workers_per_host"])) * carrying >= found["cores"] * (1 - 1e-9)
    assert found["workers_per_host"] <= host.cores
    larger = plan(
        requested(
            rate=rate * more,
            record_bytes=record_bytes,
            retention_s=retention,
            replication=copies,
            compression=compression,
            consumers=consumers,
            headroom=headroom,
        ),
        host,
        shipped_figures(),
    )
    assert (
        larger["hosts"] >= found["hosts"]
        and larger["disk"] >= found["disk"] * (1 - 1e-9)
        and larger["cores"] >= found["cores"] * (1 - 1e-9)
    )


@pytest.mark.parametrize("cores", [3, 7])
def test_a_load_that_exceeds_whole_hosts_by_rounding_alone_is_planned(cores):
    host = Host(cores=cores, memory_bytes=1e15, disk_bytes=1e18, disk_bytes_per_s=1e12, network_bytes_per_s=1e12)
    cores_of_one = plan(requested(rate=1), Host(cores=64), FIGURES)["cores"]
    for hosts in range(1, 10):
        exact = hosts * cores / cores_of_one
        for rate in (math.nextafter(exact, 0), exact, math.nextafter(exact, math.inf)):
            found = plan(requested(rate=rate), host, FIGURES)
            assert (found["hosts"], found["workers_per_host"]) == (hosts, cores)
