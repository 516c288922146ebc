"""Host names passed to the resolver."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def looked_up(host: str) -> Iterator[None]:
    """Wraps a name look-up: a malformed name, with an empty or too long label, raises OSError like
    an unknown one.
    """
    try:
        yield
    except UnicodeError as error:
        raise OSError(f"{host} is no name of a host: {error}") from error
