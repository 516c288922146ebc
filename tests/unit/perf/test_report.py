"""The benchmark's report: verdicts, spreads, pages, history; and the kernel's accounting that it
uses.
"""

from __future__ import annotations

import json
import os
import time

import pytest

from perf import __main__ as command
from perf import accounting, report
from perf.bench import Bench
from perf.report import BELOW, MISSED, NOT_ALWAYS, REACHED, Figure


def figures() -> list[Figure]:
    return [
        Figure("cost", "CPU-µs", [14.0, 9.0, 31.0], 15.0),
        Figure("rate", "GB/s", [1.5, 2.5, 1.75], 2.0, at_least=True),
        Figure("for information", "µs", [0.5], note="no target"),
        Figure("fdatasync of 1 KiB, p50", "µs", [101.26]),
    ]


def test_the_median_misses_a_target_and_every_repetition_reaches_it() -> None:
    cost, rate, information, _ = figures()
    assert (cost.verdict, rate.verdict, information.verdict) == (NOT_ALWAYS, MISSED, "")
    assert Figure("cost", "CPU-µs", [14.0, 9.0, 15.0], 15.0).verdict == REACHED
    assert Figure("rate", "GB/s", [2.0, 3.0, 1.9], 2.0, at_least=True).verdict == NOT_ALWAYS
    assert Figure("cost", "", [15.0], 15.0).verdict == REACHED, "a bound belongs to its range"
    assert Figure("rate", "", [2.0], 2.0, at_least=True).verdict == REACHED
    assert Figure("cost", "", [15.001], 15.0).verdict == MISSED
    assert (cost.target_text, rate.target_text, information.target_text) == ("≤ 15", "≥ 2", "")


def test_a_difference_within_noise_is_reported_as_such() -> None:
    """A difference of two measurements: nothing negative is shown."""
    figure = Figure("added", "CPU-µs/s", [-6.1, -3.3, 0.3], 10.0)
    assert report.rows([figure]) == [("added", BELOW, "0–0.3", "CPU-µs/s", "≤ 10", REACHED)]
    assert report.spread(Figure("added", "", [-2.0, -1.0])) == "0–0"


def test_a_figure_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="cost has no values"):
        Figure("cost", "CPU-µs", [])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.22341, "0.223"),
        (8.154, "8.15"),
        (15, "15"),
        (99.96, "100"),
        (999.9, "1000"),
        (1000, "1,000"),
        (2_428_613, "2,430,000"),
        (-68.24, "-68.2"),
        (-2640, "-2,640"),
    ],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert report.number(value) == text


def test_the_plain_table_lines_up_and_keeps_notes() -> None:
    lines = report.plain_table(figures()).splitlines()
    assert lines[0].split() == list(report.HEADINGS)
    assert lines[2].split() == ["cost", "14", "9–31", "CPU-µs", "≤", "15", "not", "in", "every", "run"]
    column = lines[0].index("unit")
    assert all(line[column - 2 : column] == "  " for line in lines[:6])
    assert lines[-1] == "* for information: no target"


def test_history_keeps_what_the_page_shows(tmp_path) -> None:
    history = tmp_path / "history.jsonl"
    facts = {"cpu": "A CPU", "cores": 2, "kernel": "6.18"}
    with history.open("a") as out:
        out.write(report.history_line("2026-01-01T00:00:00", "older", facts, figures()[:1]) + "\n")
        out.write(report.history_line("2026-11-21T05:00:00", "0123456789abcdef", facts, figures()) + "\n\n")
    run = report.last_run(history)
    assert run["commit"] == "0123456789abcdef"
    assert run["figures"]["cost"] == {
        "unit": "CPU-µs",
        "median": 14,
        "min": 9,
        "max": 31,
        "repetitions": 3,
        "target": 15.0,
        "at_least": False,
        "verdict": "not in every run",
    }
    block = report.page_block(run)
    head = " ".join(block.partition("\n\n")[0].split())
    assert "2 cores of A CPU, Linux 6.18, 2026-11-21, commit 0123456789; the disk's fdatasync took 101 µs" in head
    assert "0 of 2 targets reached in every repetition" in head
    assert "| cost | **14** | CPU-µs | 9–31 | ≤ 15 | not in every run |" in block
    assert "| rate | **1.75** | GB/s | 1.5–2.5 | ≥ 2 | missed |" in block
    assert "for information" not in block
    for line in history.read_text().split("\n"):
        assert not line or json.loads(line)


def test_a_figure_survives_history() -> None:
    for figure in figures():
        again = Figure.from_json(figure.name, json.loads(json.dumps(figure.to_json())))
        assert (again.median, again.verdict, again.note) == (
            pytest.approx(figure.median, rel=1e-3),
            figure.verdict,
            figure.note,
        )
        assert report.spread(again) == report.spread(figure)


def test_a_unit_that_has_another_name_now_is_shown_by_it() -> None:
    older = Figure("compaction", "MB/s per CPU-second", [1.0]).to_json()
    assert Figure.from_json("compaction", older).unit == "MB per CPU-second"


def test_a_missing_history_names_the_command(tmp_path) -> None:
    with pytest.raises(ValueError, match="make bench"):
        report.last_run(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="make bench"):
        report.last_run(tmp_path / "empty.jsonl")


FACTS = {"cpu": "A CPU", "cores": 2, "kernel": "6.18"}


def _line(date: str, commit: str, found: list[Figure], **more: object) -> str:
    return report.history_line(date, commit, FACTS, found, **more) + "\n"


def test_later_runs_of_some_cases_are_shown_among_the_last_whole_run(tmp_path) -> None:
    history = tmp_path / "history.jsonl"
    history.write_text(
        _line("2026-01-01", "older", figures(), kind="cases", cases=["produce"])
        + _line("2026-01-02", "whole", figures())
        + _line("2026-01-03", "first", [Figure("tail", "ms", [3.0], 2.0)], kind="cases", cases=["tail"])
        + _line("2026-01-04", "tried", [Figure("tail", "ms", [0.1], 2.0)], kind="trial", cases=["tail"])
        + _line("2026-01-05", "second", [Figure("tail", "ms", [1.0], 2.0)], kind="cases", cases=["tail"])
        + _line("2026-01-06", "third", [Figure("rate", "GB/s", [5.0], 2.0, True)], kind="cases", cases=["fetch"])
    )
    run, *later = report.last_runs(history)
    assert report.last_run(history) == run and run["commit"] == "whole"
    assert [one["commit"] for one in later] == ["first", "second", "third"]
    block = report.page_block(run, later)
    assert "| cost | **14** | CPU-µs | 9–31 | ≤ 15 | not in every run |" in block
    assert "| rate † | **5** | GB/s | 5–5 | ≥ 2 | reached |" in block
    assert "| tail † | **1** | ms | 1–1 | ≤ 2 | reached |" in block and block.count("tail †") == 1
    head = " ".join(block.partition("\n\n")[0].split())
    assert "`make bench` on 2 cores of A CPU, Linux 6.18, 2026-01-02, commit whole;" in head
    assert "2 of 3 targets reached" in head
    assert head.endswith(
        "†: measured later, without the other cases: `python -m perf tail` on 2 cores of A CPU, Linux 6.18,"
        " 2026-01-05, commit second; `python -m perf fetch` on 2 cores of A CPU, Linux 6.18, 2026-01-06, commit third."
    ), "of the run that was replaced there is nothing left"


def test_recorded_figures_are_judged_by_the_present_targets() -> None:
    run = json.loads(_line("2026-01-02", "whole", figures()))
    block = report.page_block(run, targets={"cost": 8.0, "rate": 1.25, "not measured": 1.0})
    assert "| cost | **14** | CPU-µs | 9–31 | ≤ 8 | missed |" in block
    assert "| rate | **1.75** | GB/s | 1.5–2.5 | ≥ 1.25 | reached |" in block
    assert "not measured" not in block


def test_some_cases_without_a_whole_run_fill_no_page(tmp_path) -> None:
    history = tmp_path / "history.jsonl"
    history.write_text(_line("2026-01-01", "older", figures(), kind="cases", cases=["produce"]))
    with pytest.raises(ValueError, match="make bench"):
        report.last_runs(history)


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["disk", "--record"], {"kind": "cases", "cases": ["disk"]}),
        (["disk", "--record", "--quick"], {"kind": "trial", "cases": ["disk"]}),
        ([], {}),
    ],
)
def test_a_recorded_line_says_whether_the_run_was_whole(
    words: list[str], more: dict, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = tmp_path / "history.jsonl"
    monkeypatch.setattr(command, "HISTORY", history)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "build", lambda: None)
    monkeypatch.setattr(command, "wait_until_idle", lambda seconds: 0.0)
    monkeypatch.setattr(command, "CASES", {"disk": lambda bench: bench.add("fdatasync", "µs", [1.0])})
    monkeypatch.setenv("MQD_PERF_DIR", str(tmp_path))
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)
    assert command.main(words) == 0
    line = json.loads(history.read_text())
    assert {name: line[name] for name in ("kind", "cases") if name in line} == more
    assert line["figures"]["fdatasync"]["median"] == 1.0


PAGE = "# head\n<!-- bench:begin -->\nold\n<!-- bench:end -->\n<!-- other:begin --><!-- other:end -->tail\n"


def test_only_the_block_is_replaced() -> None:
    page = report.replace_block(PAGE, "bench", r"new \1 \g<0>")
    assert page == PAGE.replace("old", r"new \1 \g<0>"), "backslashes are text, not references"
    assert report.replace_block(page, "bench", "old") == PAGE


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<!-- bench:begin -->",
        "<!-- bench:end --><!-- bench:begin -->",
        PAGE + PAGE,
        PAGE.replace("<!-- bench:end -->", ""),
    ],
    ids=["none", "no end", "crossed", "twice", "open"],
)
def test_a_page_without_its_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="bench:begin"):
        report.replace_block(page, "bench", "new")


def test_pages_have_the_marks_that_the_bench_fills() -> None:
    from perf.settings import BLOCKS

    for name in ("settings", *BLOCKS):
        report.replace_block(command.PAGE.read_text(), name, "")
    report.replace_block(command.PAGE.read_text(), "bench", "")


def test_the_page_is_filled_from_the_last_line(tmp_path, monkeypatch) -> None:
    history, page = tmp_path / "history.jsonl", tmp_path / "performance.md"
    history.write_text(
        report.history_line("2026-11-21T05:00:00", "abc", {"cpu": "A CPU", "cores": 2, "kernel": "6.18"}, figures())
        + "\n"
    )
    page.write_text(PAGE)
    monkeypatch.setattr(command, "HISTORY", history)
    monkeypatch.setattr(command, "PAGE", page)
    assert command.main(["--page"]) == 0
    assert "| cost | **14** | CPU-µs" in page.read_text()
    assert page.read_text().endswith("tail\n")


def test_an_unknown_case_is_refused_before_anything_is_measured(capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.main(["produse"])
    assert exit_.value.code == 2
    assert "no case produse; there are: settings," in capsys.readouterr().err


# -- accounting ------------------------------------------------------------------------------------


def test_cpu_time_is_the_kernels() -> None:
    before, own_before = accounting.cpu_time([os.getpid()]), time.process_time_ns()
    while time.process_time_ns() - own_before < 20_000_000:
        pass
    spent, own = accounting.cpu_time([os.getpid()]) - before, time.process_time_ns() - own_before
    assert 20_000_000 <= spent.run_ns <= own + 50_000_000
    assert spent.reactor_ns == 0, "no thread of that name here"


def test_user_and_system_time_are_apart() -> None:
    before = accounting.cpu_time([os.getpid()])
    until = time.process_time() + 0.2
    while time.process_time() < until:
        sum(range(100_000))
    spent = accounting.cpu_time([os.getpid()]) - before
    assert spent.user_ns + spent.system_ns == pytest.approx(spent.run_ns, abs=50_000_000)
    assert spent.user_ns > spent.system_ns, "adding up is in user mode"
    assert accounting.CpuTime(user_ns=10, system_ns=30).kernel_percent == 75
    assert accounting.CpuTime().kernel_percent == 0


def test_a_dead_process_is_an_error_not_a_zero() -> None:
    with pytest.raises(OSError):
        accounting.cpu_time([2**22 + 1])


def test_memory_and_machine() -> None:
    assert 1 << 20 < accounting.pss_bytes([os.getpid()]) < 1 << 33
    facts = accounting.machine()
    assert facts["cores"] == os.cpu_count() and facts["kernel"]
    assert 0 <= accounting.busy_share(0.05) <= 1


# -- disturbed measurements ------------------------------------------------------------------------


def _runs(*waited_shares: float):
    """A measurement that was kept from its CPU for these successive shares of its second."""
    left = list(waited_shares)
    return lambda: ({"seconds": 1.0, "count": len(left)}, accounting.CpuTime(10, 10, int(left.pop(0) * 1e9)))


def test_a_disturbed_measurement_is_repeated_until_it_is_calm() -> None:
    bench = Bench(None, lambda line: None)  # type: ignore[arg-type]  # no broker is asked for
    result, spent = bench.measure_undisturbed(_runs(0.5, 0.3, 0.01, 0.0))
    assert spent.waited_ns == 10_000_000
    assert result["count"] == 2, "the fourth was not made"
    assert (bench.measured, bench.disturbed) == (1, 0)


def test_when_all_are_disturbed_the_least_disturbed_is_used_and_reported() -> None:
    bench = Bench(None, lambda line: None)  # type: ignore[arg-type]
    _, spent = bench.measure_undisturbed(_runs(0.5, 0.3, 0.2, 0.4))
    assert spent.waited_ns == 200_000_000
    assert (bench.measured, bench.disturbed) == (1, 1)


def test_quick_runs_repeat_twice() -> None:
    message: list[str] = []
    assert list(Bench(None, message.append, quick=True).repeat("case")) == [0, 1]  # type: ignore[arg-type]
    assert message[1].endswith("case: 2 of 2")
