"""The shared-memory benchmark without a broker: its table, its commands, and that every case is
listed under its name.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from perf import cases, cases_local, loading
from perf.accounting import CpuTime
from perf.report import Figure

ROOT = Path(__file__).resolve().parents[3]


FACTS = {"cores": 2, "cpu": "a CPU", "kernel": "6.1", "disturbed": "1 of 9"}


def kept_figures() -> list[Figure]:
    added: list[Figure] = []
    bench = SimpleNamespace(
        add=lambda name, unit, values, target=None, *, at_least=False, note="": added.append(
            Figure(name, unit, values, target, at_least, note)
        )
    )
    samples = cases_local._Samples()
    for factor in (1, 2, 3):
        samples.load(
            "produce, shared memory",
            {"count": 1_000_000 * factor, "seconds": 0.5, "client_cpu_seconds": 0.4 * factor},
            CpuTime(run_ns=200_000_000 * factor),
        )
    samples.add_to(bench, "produce, shared memory", 5e6)
    return [*added, Figure("local: round trip", "µs", [3.0], 15.0), Figure("something else", "µs", [1.0], 0.5)]


def test_rates_and_their_cost_for_both_sides():
    rate, client, broker, alone = kept_figures()[:4]
    assert (rate.median, client.median, broker.median, alone.median) == (4e6, 0.4, 0.2, 2.5e6)
    assert rate.verdict == "missed"


def test_the_page_has_a_line_for_each_and_names_missed_targets():
    page = cases_local.page(kept_figures(), FACTS, "2026-01-02T03:04:05+00:00")
    assert (
        "2 cores of a CPU" in page and "2026-01-02;" in page and "1 of 9 measurements. 1 of 2 targets reached." in page
    )
    assert (
        "| produce, shared memory | **4,000,000** | 2,000,000–6,000,000 | 0.4 | 0.2 | 2,500,000 | ≥ 5,000,000 |"
        " missed |" in page
    )
    assert "| round trip | **3** µs | 3–3 | ≤ 15 | reached |" in page
    assert "something else" not in page and page.count("client, CPU-s") == 1


def test_the_targets_of_python_are_those_of_its_figures():
    assert cases_local.TARGETS["local: produce, shared memory"] == 1.5e6
    assert set(cases_local.PYTHON_TARGETS) < set(cases_local.PYTHON_RECORDS)


def test_a_page_of_single_cases_has_no_empty_table():
    assert cases_local.page([Figure("local: round trip", "µs", [3.0])], FACTS, "2026-01-02").count("\n| ---") == 1


def test_every_case_is_run_by_the_bench_and_every_python_load_exists():
    from perf.local_load import WORK

    assert set(cases_local.CASES) <= set(cases.CASES)
    assert {*cases_local.PYTHON_RECORDS, "idle", "round_trip"} == set(WORK)


def test_the_client_is_linked_from_files_that_exist():
    assert [name for name in loading.LOCAL_PARTS if not (ROOT / "native" / name).exists()] == []
