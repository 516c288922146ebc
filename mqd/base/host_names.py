"""Names of hosts on their way to the resolver."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def looked_up(host: str) -> Iterator[None]:
    """Around what looks a name up: one that cannot even be asked for, with an empty or a too long
    label, is an OSError like one that is not found. Raises OSError.
    """
    try:
        yield
    except UnicodeError as error:
        raise OSError(f"{host} is no name of a host: {error}") from error
