"""Expiry of this broker's certificates: warnings in the log as it approaches, and a metric.

A thread reads the certificate files, at the start and after each change, so that the event loop
does not wait for the disk. Each certificate's expiry is logged once at each of WARN_DAYS, and daily
once the certificate has expired.
"""

import asyncio
import datetime
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from mqd.base import listeners, logging
from mqd.base.property_values import ConfigError
from mqd.native.tls import TlsIdentity
from mqd.security import host_identity, tls_files
from mqd.security.python_tls import pem_of_pkcs12

POLL_S = 60.0
WARN_DAYS = (30, 14, 7, 1)
_DAY = datetime.timedelta(days=1)
_ADVICE = "replace it (mqd cert renew); the new one is loaded without a restart"
log = logging.get("acceptor.certificates")


def expiry_of(pem: bytes) -> datetime.datetime:
    """The earliest expiry among the certificates of a chain. Raises ValueError."""
    from cryptography import x509

    return min(certificate.not_valid_after_utc for certificate in x509.load_pem_x509_certificates(pem))


def due_warning(expiry: datetime.datetime, now: datetime.datetime) -> int | None:
    """The warning that is due. Before the expiry: the smallest of WARN_DAYS that is not less than the
    days left, or None if it is too early to warn. After the expiry: -1 on the first day, then one
    less each day.
    """
    if expiry <= now:
        return -1 - (now - expiry) // _DAY
    return next((days for days in reversed(WARN_DAYS) if expiry - now <= days * _DAY), None)


class Certificates:
    """`expiries_s`: the expiry by listener, in seconds since 1970; the key "hosts" stands for the
    certificate between hosts. The dictionary is replaced, never modified.
    """

    def __init__(self, config: Mapping[str, str]) -> None:
        self.expiries_s: dict[str, float] = {}
        self._file_states: list[tuple[int, int, int]] = []
        self._expiries: dict[str, datetime.datetime] = {}
        self._warned: dict[str, tuple[datetime.datetime, int]] = {}
        self._chain_readers: dict[str, Callable[[], list[bytes]]] = {}
        self._files: list[Path] = []
        tls_listeners = [listener for _, listener in tls_files.listeners_with_tls(config)]
        metrics = listeners.metrics_listener(config)
        for listener in [*tls_listeners, *([metrics] if metrics is not None and metrics.has_tls else [])]:
            self._chain_readers[listener.name] = partial(_chains, config, listener)
            self._files += tls_files.files(config, listener)
        if config.get("cluster.tls", "off") != "off":
            file = Path(config[host_identity.CERTIFICATE])
            self._chain_readers["hosts"] = lambda: [file.read_bytes()]
            self._files.append(file)

    async def run(self) -> None:
        """Runs until cancelled."""
        while self._chain_readers:
            await asyncio.to_thread(self.check, datetime.datetime.now(datetime.UTC))
            await asyncio.sleep(POLL_S)

    def check(self, now: datetime.datetime) -> None:
        file_states = [tls_files.file_state(path) for path in self._files]
        if file_states != self._file_states or not self._expiries:
            self._file_states = file_states
            self._read()
        for name, expiry in self._expiries.items():
            due = due_warning(expiry, now)
            if due is not None and self._warned.get(name) != (expiry, due):
                self._warned[name] = expiry, due
                self._warn(name, expiry, (expiry - now) // _DAY)

    def _read(self) -> None:
        for name, read_chains in self._chain_readers.items():
            try:
                self._expiries[name] = min(map(expiry_of, read_chains()))
            except (ConfigError, OSError, ValueError):
                continue  # the listener fails to load it too, and logs that
        self.expiries_s = {name: expiry.timestamp() for name, expiry in self._expiries.items()}

    def _warn(self, name: str, expiry: datetime.datetime, days: int) -> None:
        use, peers = ("between hosts", "other hosts") if name == "hosts" else (f"of listener {name}", "clients")
        if days < 0:
            log.error(f"the certificate {use} has expired: {peers} refuse it; {_ADVICE}", ended=f"{expiry:%Y-%m-%d}")
        else:
            log.warning(f"the certificate {use} expires soon; {_ADVICE}", ends=f"{expiry:%Y-%m-%d}", days_left=days)


def _chains(config: Mapping[str, str], listener: listeners.Listener) -> list[bytes]:
    """Raises ConfigError, ValueError."""
    return [_chain(identity) for identity in tls_files.read(config, listener).identities]


def _chain(identity: TlsIdentity) -> bytes:
    """Certificates as PEM. Raises ValueError."""
    return pem_of_pkcs12(identity.chain) if identity.key is None else identity.chain.content
