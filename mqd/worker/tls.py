"""A worker's certificates, for its TLS listeners and for connections between hosts: loaded before
it serves, and again when a file has changed or the key of session tickets is due to change.

Invariants: a TLS listener serves nothing before its certificate is loaded (the reactor refuses its
connections); if loading fails, the previous certificate stays in use and the failure is logged
once. Files are read by a thread, never on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

from mqd.base import clock, logging
from mqd.base.listeners import Listener
from mqd.base.property_values import ConfigError
from mqd.cluster.membership.credentials import Credentials
from mqd.native import Event, NativeError, Reactor
from mqd.native.tls import LISTENER_ID_HOSTS, TlsContext, context_between_hosts, tls_version
from mqd.security import tls_files
from mqd.security.host_identity import CERTIFICATE, HostIdentity
from mqd.security.principal import map_name, user
from mqd.worker.commands import ReactorCommands

POLL_S = 2.0

log = logging.get("worker.tls")


class _State(NamedTuple):
    """Identifies the files' contents: if it changes, the TLS context is created again."""

    ticket_epoch: int
    files: tuple[tuple[int, int, int], ...]  # tls_files.file_state()


class TlsListeners:
    """`secret`: for the keys of session tickets."""

    def __init__(
        self,
        config: Mapping[str, str],
        reactor: Reactor,
        commands: ReactorCommands,
        secret: bytes,
        credentials: Credentials,
    ):
        self._config = config
        self._reactor = reactor
        self._commands = commands
        self._secret = secret
        self._listeners = tls_files.listeners_with_tls(config)
        self._states: dict[int, _State] = {}
        self._credentials = credentials
        self._use_certificate_task: asyncio.Task[None] | None = None
        self._rules = {index: tls_files.principal_rules(config, listener) for index, listener in self._listeners}

    def load(self) -> None:
        """Called before the reactor starts. Raises ConfigError."""
        for index, listener in self._listeners:
            self._states[index] = self._state(listener)
            self._reactor.set_listener_tls(0, index, self._context(listener))
        if self._credentials.host is not None:
            try:
                self._reactor.set_listener_tls(0, LISTENER_ID_HOSTS, _host_context(self._credentials.host))
            except NativeError as error:
                raise ConfigError(f"the host certificate cannot be used: {error.strerror}", CERTIFICATE) from None
        if self._listeners:
            log.info("TLS", library=tls_version(), listeners=",".join(listener.name for _, listener in self._listeners))

    async def run(self) -> None:
        await asyncio.gather(self._watch_listeners(), self._credentials.watch(self._on_host_certificate_changed))

    def _on_host_certificate_changed(self) -> None:
        self._use_certificate_task = asyncio.get_running_loop().create_task(self._use_host_certificate())

    async def _use_host_certificate(self) -> None:
        """Sets the context of new connections; existing ones keep theirs."""
        if self._credentials.host is None:
            return
        try:
            context = _host_context(self._credentials.host)
            await self._commands.run(self._reactor.set_listener_tls, LISTENER_ID_HOSTS, context)
        except NativeError as error:
            log.warning(
                "a changed host certificate cannot be used for data connections; the previous one stays in use",
                reason=str(error),
            )

    async def _watch_listeners(self) -> None:
        while self._listeners:
            await asyncio.sleep(clock.seconds_until_tick(POLL_S))
            for index, listener in self._listeners:
                await self._maybe_reload(index, listener)
        await asyncio.Event().wait()  # nothing to do; the task must not end

    async def _maybe_reload(self, index: int, listener: Listener) -> None:
        state = await asyncio.to_thread(self._state, listener)
        if state == self._states[index]:
            return
        files_changed = state.files != self._states[index].files
        self._states[index] = state
        try:
            context = await asyncio.to_thread(self._context, listener)
            await self._commands.run(self._reactor.set_listener_tls, index, context)
        except (ConfigError, NativeError) as error:
            log.warning(
                "a changed certificate cannot be used; the previous one stays in use",
                listener=listener.name,
                reason=str(error),
            )
            return
        if files_changed:
            log.info("certificate reloaded", listener=listener.name)

    def principal(self, listener_id: int, name: str) -> str:
        """The principal to which a certificate's subject maps; "": no rule matches, or no such user
        can exist.
        """
        principal = map_name(self._rules[listener_id], name)
        try:
            return user(principal) if principal is not None else ""
        except ValueError as error:
            log.warning("a certificate's subject maps to no user", subject=name, reason=str(error))
            return ""

    async def on_certificate_subject(self, event: Event) -> None:
        """A client has authenticated by its certificate and waits for its principal."""
        await self._commands.run(self._reactor.tls_principal, event.token, self.principal(event.slot, event.text))

    def _context(self, listener: Listener) -> TlsContext:
        return tls_files.context(self._config, listener, self._secret, time.time())

    def _state(self, listener: Listener) -> _State:
        files = tuple(tls_files.file_state(path) for path in tls_files.files(self._config, listener))
        return _State(int(time.time()) // tls_files.TICKET_EPOCH_S, files)


def _host_context(host: HostIdentity) -> TlsContext:
    return context_between_hosts(host.files.certificate, host.files.key, host.files.ca)
