"""A console that serves its pages on a port, in a thread of the test."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from mqd.console.command import server_of
from mqd.console.options import Options
from tests.interaction.traffic import eventually
from tests.ports import free_port


@contextlib.contextmanager
def served(options: Options) -> Iterator[int]:
    server = server_of(options)
    with socket.create_server((options.host, free_port())) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            eventually(lambda: server.started, "started")
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)
