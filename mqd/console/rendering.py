"""Templates, and the formatting of numbers, times and untrusted text."""

from __future__ import annotations

import re
import unicodedata
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2

from mqd.cli.common import human_bytes
from mqd.cli.verbs.status import duration

FOLDER = Path(__file__).parent
_INVISIBLE_CATEGORIES = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
_PLAIN = re.compile(r"[\n\t\x20-\x7e]*")


def visible(text: str) -> str:
    """The text with invisible characters, and those that change the text direction, replaced with
    their code points, so that no name looks like another one.
    """
    if _PLAIN.fullmatch(text):
        return text
    return "".join(
        f"\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}U+{ord(char):04X}\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
        if unicodedata.category(char) in _INVISIBLE_CATEGORIES and char not in "\n\t"
        else char
        for char in text
    )


def url(path: str, /, **query: object) -> str:
    """The path with a query; leaves out empty values."""
    encoded_query = urlencode(
        [
            (name, str(value))
            for name, value in query.items()
            if value is not None and value is not False and value != ""
        ]
    )
    return f"{path}?{encoded_query}" if encoded_query else path


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def pluralize(noun: str, count: int | None) -> str:
    """The noun, in the plural unless the count is 1."""
    return noun if count == 1 else f"{noun}s"


def size(value: float | None) -> str:
    return "–" if value is None else human_bytes(value)


def moment(milliseconds: int | None) -> str:
    """The time in this host's time zone, with the zone's offset."""
    if milliseconds is None or milliseconds < 0:
        return "–"
    try:
        return datetime.fromtimestamp(milliseconds / 1000).astimezone().isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"  # an implausible time from a client


def duration_text(seconds: float | None) -> str:
    return "–" if seconds is None else "under 1 s" if 0 < seconds < 1 else duration(int(max(0, seconds)))


def environment() -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters: dict[str, Any] = {
        "visible": visible, "number": number, "size": size, "moment": moment, "duration": duration_text,
        "pluralize": pluralize,
    }  # fmt: skip
    env.filters |= filters
    env.globals["url"] = url
    return env


def sparkline(values: list[float], width: int = 240, height: int = 40) -> str:
    """Points of an SVG polyline, the newest at the right; "" for fewer than two values."""
    if len(values) < 2:
        return ""
    top = max(*values, 1e-9)
    step = width / (len(values) - 1)
    return " ".join(
        f"{index * step:.1f},{height - 2 - value / top * (height - 4):.1f}" for index, value in enumerate(values)
    )
