"""Credentials between the hosts of a cluster: the keys of cluster.key.file and, with cluster.tls,
the certificates. Both change while the broker runs.

    credentials = load(config)
    side = credentials.initiator("data", identity); ... until side.done
    tls = credentials.tls(side)          None: the connection continues without TLS
    await credentials.watch(on_change)   reads changed files again, until cancelled

New connections use the current credentials; open connections continue.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence

from mqd.base import clock, cluster_config, logging
from mqd.base.property_values import ConfigError
from mqd.cluster.membership import handshake
from mqd.cluster.membership.handshake import Hello, Identity, Initiator, Refusal, Responder
from mqd.cluster.membership.host_tls import HostTls
from mqd.security import host_identity
from mqd.security.host_identity import HostIdentity

POLL_S = 2.0
REFUSED_MAX = 64

log = logging.get("host.credentials")


_FileStamp = tuple[int, int, int]  # inode, size, ctime in ns (which chmod changes, too); zeros: no file


def _key_file_stamp(config: Mapping[str, str]) -> _FileStamp:
    """Returns a stamp of the key file, which differs from the previous one if the file has changed."""
    path = config.get("cluster.key.file")
    try:
        status = os.stat(path) if path else None
    except OSError:
        status = None
    return (status.st_ino, status.st_size, status.st_ctime_ns) if status is not None else (0, 0, 0)


class Credentials:
    """`secrets`: the cluster's keys; this host authenticates with the first and accepts all. `config`:
    their source, for reloading. `stamp`: the key file's stamp from before the keys were read.
    """

    def __init__(
        self,
        secrets: Sequence[bytes],
        host: HostIdentity | None = None,
        config: Mapping[str, str] | None = None,
        stamp: _FileStamp = (0, 0, 0),
    ) -> None:
        self._config = config or {}
        self._stamp = stamp
        self.host = host  # None: cluster.tls=off
        self._use(tuple(secrets))

    def _use(self, secrets: tuple[bytes, ...]) -> None:
        self.secrets = secrets
        self._keys = tuple(handshake.derive_key(secret, "handshake") for secret in secrets)

    @property
    def _mode(self) -> int:
        return self.host.mode if self.host is not None else handshake.TLS_OFF

    def initiator(self, purpose: str, identity: Identity, worker: int = -1) -> Initiator:
        return Initiator(self._keys[0], purpose, identity, os.urandom(handshake.NONCE_BYTES), worker, self._mode)

    def responder(self, decide: Callable[[Hello], Identity | Refusal]) -> Responder:
        return Responder(self._keys[0], decide, os.urandom(handshake.NONCE_BYTES), self._mode, self._keys[1:])

    def tls(self, side: Initiator | Responder) -> HostTls | None:
        """Returns the TLS with which a connection continues after its handshake; None: without TLS."""
        if not side.uses_tls:
            return None
        assert self.host is not None and side.peer is not None
        if isinstance(side, Initiator):
            assert isinstance(side.peer, Identity)
            return HostTls(self.host.client, False, side.peer.node_id)
        assert isinstance(side.peer, Hello)
        return HostTls(self.host.server, True, side.peer.identity.node_id)

    def reload(self) -> bool:
        """Reads changed files; returns whether new credentials are in use. Unusable files are logged once.
        Reads files, so it must not be called in the event loop's thread.
        """
        return any([self._reload_keys(), self._reload_host()])  # a list, so that both are called

    def _reload_keys(self) -> bool:
        stamp = _key_file_stamp(self._config)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            secrets = cluster_config.load_keys(self._config)
        except ConfigError as error:
            log.warning("a changed cluster key cannot be used; the previous one stays in use", reason=str(error))
            return False
        if secrets == self.secrets:
            return False
        self._use(secrets)
        log.info("cluster key reloaded", keys=len(secrets))
        return True

    def _reload_host(self) -> bool:
        if self.host is None:
            return False
        try:
            changed = self.host.reload()
        except ConfigError as error:
            log.warning("a changed host certificate cannot be used; the previous one stays in use", reason=str(error))
            return False
        if changed:
            log.info("host certificate reloaded", node=self.host.node_id)
        return changed

    async def watch(self, on_change: Callable[[], object] = lambda: None) -> None:
        """Reloads changed files until cancelled. Calls `on_change()` in the loop's thread after each change."""
        while self.host is not None or self._config.get("cluster.key.file"):
            await asyncio.sleep(clock.seconds_until_tick(POLL_S))
            if await asyncio.to_thread(self.reload):
                on_change()
        await asyncio.Event().wait()  # there are no files to watch, but the task must not end


class RefusedHosts:
    """The last REFUSED_MAX hosts that were refused, and the reasons, so that repeated attempts of a
    host are logged only once.
    """

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}

    def is_new(self, node_id: int | None, reason: str) -> bool:
        """Whether the refusal should be logged. `node_id`: as authenticated; None: not authenticated, and
        always new.
        """
        if node_id is None:
            return True
        if self._reasons.get(node_id) == reason:
            return False
        self._reasons[node_id] = reason
        if len(self._reasons) > REFUSED_MAX:
            del self._reasons[next(iter(self._reasons))]
        return True

    def on_admitted(self, node_id: int) -> None:
        self._reasons.pop(node_id, None)


def load(config: Mapping[str, str]) -> Credentials:
    """Loads the credentials that the configuration names. Raises ConfigError."""
    stamp = _key_file_stamp(config)
    return Credentials(cluster_config.load_keys(config), host_identity.load(config), config, stamp)
