"""Charts are well-formed, and their marks are at the right positions."""

import xml.etree.ElementTree as ElementTree

import pytest

from perf import charts
from perf.charts import Series, line_chart, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("most", "expected"), [(16, 10 / 2), (1_000_000, 200_000), (7, 2), (0.03, 0.005), (1, 0.2)])
def test_ticks_are_round_and_reach_the_top(most, expected):
    found = ticks(most)
    assert found[0] == 0 and found[-1] >= most * (1 - 1e-9) and found[1] - found[0] == pytest.approx(expected)
    assert 3 <= len(found) <= 8


def test_points_are_at_the_position_of_their_values():
    text = line_chart(
        "<rates> & more",
        "clients",
        "records/s",
        [
            Series("measured", points=[(0, 0, 0, 0), (10, 50, 60, 100)]),
            Series("law", curve=[(0, 0), (10, 100)], dashed=True),
        ],
    )
    root = ElementTree.fromstring(text)
    circles = [(float(one.get("cx")), float(one.get("cy"))) for one in root.iter(f"{SVG}circle")][:2]
    origin, point = circles
    assert origin == (charts.LEFT, charts.HEIGHT - charts.BOTTOM)
    assert point[0] == pytest.approx(charts.WIDTH - charts.RIGHT, abs=0.1)
    assert point[1] == pytest.approx(
        charts.HEIGHT - charts.BOTTOM - 0.6 * (charts.HEIGHT - charts.TOP - charts.BOTTOM), abs=0.1
    )
    curve = next(root.iter(f"{SVG}polyline"))
    assert (
        curve.get("stroke-dasharray")
        and curve.get("points").split()[-1] == f"{charts.WIDTH - charts.RIGHT:.1f},{charts.TOP:.1f}"
    )
    assert [one.text for one in root.iter(f"{SVG}text")].count("measured") == 1


def test_an_empty_chart_is_refused():
    with pytest.raises(ValueError, match="no point"):
        line_chart("empty", "x", "y", [Series("nothing")])


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (950, "950"), (1500, "1.5k"), (2_000_000, "2M"), (3.2e9, "3.2G"), (0.05, "0.05")]
)
def test_numbers_are_short(value, text):
    assert charts.short_number(value) == text
