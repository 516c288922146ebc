"""Line charts as SVG: points with their spread, curves, a legend; text and numbers stay text, so
that a page can be searched and a diff read. Pure.

The colours can be distinguished by colour-blind readers (Okabe and Ito's set), and every series also
has its own marker or dash.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 48, 56


@dataclasses.dataclass(frozen=True)
class Series:
    """Points (x, low, middle, high), and a curve of (x, y). Either may be empty.
    `dashed`: a guess rather than a measurement.
    """

    name: str
    points: Sequence[tuple[float, float, float, float]] = ()
    curve: Sequence[tuple[float, float]] = ()
    dashed: bool = False


def ticks(most: float, about: int = 6) -> list[float]:
    """Round numbers from 0 to at least `most`, in steps of 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [number * step for number in range(math.ceil(most / step - 1e-9) + 1)]


def short_number(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def line_chart(title: str, x_title: str, y_title: str, series: Sequence[Series]) -> str:
    """Raises ValueError if there is nothing to draw."""
    xs = [point[0] for one in series for point in (*one.points, *one.curve)]
    ys = [point[3] for one in series for point in one.points] + [y for one in series for _, y in one.curve]
    if not xs:
        raise ValueError(f"{title}: no point")
    x_ticks, y_ticks = ticks(max(xs), 8), ticks(max(ys))

    def x_at(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / x_ticks[-1]

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / y_ticks[-1]

    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
            f' font-size="12" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    out += _axes(x_title, y_title, x_ticks, y_ticks, x_at, y_at)
    for number, one in enumerate(series):
        out += _draw_series(one, COLOURS[number % len(COLOURS)], x_at, y_at)
        out += _legend(one, COLOURS[number % len(COLOURS)], TOP + 10 + 16 * number)
    return "\n".join([*out, "</svg>", ""])


def _axes(
    x_title: str,
    y_title: str,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_at: Callable[[float], float],
    y_at: Callable[[float], float],
) -> list[str]:
    out = []
    for y in y_ticks:
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_at(y):.1f}" y2="{y_at(y):.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y_at(y) + 4:.1f}" text-anchor="end">{short_number(y)}</text>')
    for x in x_ticks:
        out.append(
            f'<line x1="{x_at(x):.1f}" x2="{x_at(x):.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}"'
            ' stroke="#666666"/>'
        )
        out.append(f'<text x="{x_at(x):.1f}" y="{HEIGHT - BOTTOM + 19}" text-anchor="middle">{short_number(x)}</text>')
    out.append(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}" stroke="#666666"/>'
    )
    out.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_title)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(
        f'<text x="18" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 18'
        f' {middle:.0f})">{escape(y_title)}</text>'
    )
    return out


def _draw_series(one: Series, colour: str, x_at: Callable[[float], float], y_at: Callable[[float], float]) -> list[str]:
    out = []
    if one.curve:
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in one.curve)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{_dash(one)}/>')
    for x, low, middle, high in one.points:
        out.append(
            f'<line x1="{x_at(x):.1f}" x2="{x_at(x):.1f}" y1="{y_at(low):.1f}" y2="{y_at(high):.1f}"'
            f' stroke="{colour}"/>'
        )
        out.append(f'<circle cx="{x_at(x):.1f}" cy="{y_at(middle):.1f}" r="3.5" fill="{colour}"/>')
    return out


def _dash(one: Series) -> str:
    return ' stroke-dasharray="6 4"' if one.dashed else ""


def _legend(one: Series, colour: str, y: float) -> list[str]:
    mark = f'<circle cx="{LEFT + 25}" cy="{y - 4}" r="3.5" fill="{colour}"/>' if one.points else ""
    line = (
        f'<line x1="{LEFT + 12}" x2="{LEFT + 38}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}"'
        f' stroke-width="1.8"{_dash(one)}/>'
        if one.curve
        else ""
    )
    return [f'{line}{mark}<text x="{LEFT + 44}" y="{y}">{escape(one.name)}</text>']
