"""Comparing the benchmarks of two trees: by name, by round."""

from __future__ import annotations

from perf.trees.beside import Row, compare, table


def test_figures_of_both_trees_are_compared_by_name_and_round():
    rounds = [
        ({"a": 2.0, "gone": 1.0, "b": 4.0}, {"b": 5.0, "a": 1.0, "new": 9.0}),
        ({"a": 2.0, "b": 4.0}, {"a": 3.0, "b": 4.0}),
    ]
    rows = compare(rounds)
    assert [row.name for row in rows] == ["a", "b"]
    assert rows[0].ratios == [0.5, 1.5] and rows[1].ratios == [1.25, 1.0]


def test_a_round_whose_old_figure_is_noise_has_no_ratio():
    row = Row("difference", [0.0, 2.0], [1.0, 2.0])
    assert row.ratios == [1.0]
    assert "1.000" in table([row])
    assert table([Row("nothing", [-1.0], [1.0])]).splitlines()[1].split()[2:4] == ["-", "-"]
