"""The TLS listeners of a worker: their certificates are loaded before it serves, and again when a
file has changed or the key of session tickets is due to change.

Invariants: a TLS listener serves nothing before its certificate is loaded (the reactor refuses its
connections); what cannot be loaded leaves the previous in use and is logged once. Files are read by
a thread, never on the event loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from mqd.base import logging
from mqd.base.listeners import Listener
from mqd.base.property_values import ConfigError
from mqd.native import Event, NativeError, Reactor
from mqd.native.tls import TlsContext, tls_version
from mqd.security import tls_files
from mqd.security.principal import mapped, user
from mqd.worker.commands import ReactorCommands

LOOK_S = 2.0

log = logging.get("worker.tls")


class _State(NamedTuple):
    """Another one means that the context is to be made again."""

    ticket_epoch: int
    files: tuple[tuple[int, int, int], ...]  # (inode, size, mtime in ns); zeros: it is missing


class TlsListeners:
    def __init__(self, config: Mapping[str, str], reactor: Reactor, commands: ReactorCommands, secret: bytes):
        self._config = config
        self._reactor = reactor
        self._commands = commands
        self._secret = secret
        self._listeners = tls_files.listeners_with_tls(config)
        self._seen: dict[int, _State] = {}
        self._rules = {index: tls_files.principal_rules(config, listener) for index, listener in self._listeners}

    def load(self) -> None:
        """Before the reactor starts. Raises ConfigError."""
        for index, listener in self._listeners:
            self._seen[index] = self._look(listener)
            self._reactor.listener_tls(0, index, self._context(listener))
        if self._listeners:
            log.info("TLS", library=tls_version(), listeners=",".join(listener.name for _, listener in self._listeners))

    async def run(self) -> None:
        while self._listeners:
            await asyncio.sleep(LOOK_S)
            for index, listener in self._listeners:
                await self._maybe_reload(index, listener)
        await asyncio.Event().wait()  # nothing to do; the task must not end

    async def _maybe_reload(self, index: int, listener: Listener) -> None:
        state = await asyncio.to_thread(self._look, listener)
        if state == self._seen[index]:
            return
        files_changed = state.files != self._seen[index].files
        self._seen[index] = state
        try:
            context = await asyncio.to_thread(self._context, listener)
            await self._commands.run(self._reactor.listener_tls, index, context)
        except (ConfigError, NativeError) as error:
            log.warning(
                "a changed certificate is not used, the previous one is", listener=listener.name, reason=str(error)
            )
            return
        if files_changed:
            log.info("certificate loaded again", listener=listener.name)

    def principal(self, listener_id: int, name: str) -> str:
        """What a certificate's subject stands for; "": no rule matches, or the user cannot exist."""
        found = mapped(self._rules[listener_id], name)
        try:
            return user(found) if found is not None else ""
        except ValueError as error:
            log.warning("a certificate's subject maps to no user", subject=name, reason=str(error))
            return ""

    async def on_name(self, event: Event) -> None:
        """A client has proved a name by its certificate and waits for its principal."""
        await self._commands.run(self._reactor.tls_principal, event.token, self.principal(event.slot, event.text))

    def _context(self, listener: Listener) -> TlsContext:
        return tls_files.context(self._config, listener, self._secret, time.time())

    def _look(self, listener: Listener) -> _State:
        def about(path: str | os.PathLike[str]) -> tuple[int, int, int]:
            try:
                status = os.stat(path)
            except OSError:
                return 0, 0, 0
            return status.st_ino, status.st_size, status.st_mtime_ns

        files = tuple(about(path) for path in tls_files.files(self._config, listener))
        return _State(int(time.time()) // tls_files.TICKET_EPOCH_S, files)
