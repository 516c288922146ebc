"""Host names and IP addresses in text."""

import contextlib
import ipaddress
import re
from collections.abc import Iterator


@contextlib.contextmanager
def malformed_name_as_oserror(host: str) -> Iterator[None]:
    """Wraps a name lookup: a malformed name, with an empty or too long label, raises OSError like
    an unknown one.
    """
    try:
        yield
    except UnicodeError as error:
        raise OSError(f"{host} is not a host name: {error}") from error


def packed_ip(text: str) -> bytes:
    """16 bytes; IPv4 addresses are mapped (::ffff:a.b.c.d). Raises ValueError."""
    address = ipaddress.ip_address(text.split("%")[0])
    return address.packed if address.version == 6 else b"\0" * 10 + b"\xff\xff" + address.packed


def parse_ip_counts(text: str) -> dict[bytes, int]:
    """ "10.0.0.1:5,::1:7" as packed address -> count. Raises ValueError, which says what is wrong."""
    counts = {}
    for member in filter(None, (member.strip() for member in text.split(","))):
        address, _, count = member.rpartition(":")
        if not re.fullmatch("[0-9]{1,10}", count) or int(count) >= 2**31:
            raise ValueError(f"{member!r} is not ADDRESS:NUMBER")
        try:
            counts[packed_ip(address)] = int(count)
        except ValueError:
            raise ValueError(f"{address!r} is not an address; host names are not resolved") from None
    return counts
