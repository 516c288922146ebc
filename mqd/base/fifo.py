"""share.fifo of a share group: what is taken as a record's key, where records of a key are delivered
one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

FIFO = "share.fifo"
HEADER = "header:"
HEADER_BYTES_MAX = 63


class Fifo(NamedTuple):
    is_on: bool = False
    header: bytes = b""  # whose value is the key; empty: the record's own


def parse_fifo(text: str) -> Fifo:
    """Raises ValueError."""
    if text in ("", "key"):
        return Fifo(text == "key")
    header = text.removeprefix(HEADER).encode()
    if not text.startswith(HEADER) or not header:
        raise ValueError(f"it is empty, key, or {HEADER} and a header's name")
    if len(header) > HEADER_BYTES_MAX:
        raise ValueError(f"the header's name has more than {HEADER_BYTES_MAX} bytes")
    return Fifo(True, header)
