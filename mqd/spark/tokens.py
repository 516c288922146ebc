"""A delegation token (KIP-48) in place of a password in the options of a query:

    with DelegationToken({"kafka.bootstrap.servers": ..., "kafka.sasl.jaas.config": ..., ...}) as token:
        spark.readStream.format("mqd").options(**token.options) ... .start().awaitTermination()

Spark writes the options of a query into its plan and gives them to executors; the password stays in
the driver's Python process. The token is renewed by a thread of that process while the block runs,
and is made to expire afterwards. It has the user's rights, and also works with Spark's own
format("kafka").

    X1  the password is only in the settings of this object's connection, never in a query's options
    X2  a renewal that fails or is refused is logged and retried until the token has expired: the
        query reports its own errors
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from mqd.protocol.errors import ProtocolError, error_message, error_name
from mqd.protocol.messages import (
    CreateDelegationTokenRequest,
    ExpireDelegationTokenRequest,
    RenewDelegationTokenRequest,
)
from mqd.security import client, scram
from mqd.spark.options import MqdOptionError, SparkOptions, kafka_settings
from mqd.spark.wire import Cluster, MqdReadError

log = logging.getLogger("mqd.spark")

RETRY_S = 30.0


class DelegationToken:
    """`options`: those of a query, with `kafka.bootstrap.servers` and a user's security settings.
    Raises MqdOptionError, MqdReadError, OSError.
    """

    def __init__(self, options: Mapping[str, str], max_lifetime_s: float | None = None) -> None:
        settings = kafka_settings(SparkOptions(options), {})
        security = dict(settings.security)
        protocol = security.get("security.protocol", "PLAINTEXT").upper()
        if not protocol.startswith("SASL_"):
            raise MqdOptionError(
                f"option kafka.security.protocol: a delegation token needs a listener with SASL, not {protocol}"
            )
        self._cluster = Cluster(settings)
        self._stopped = threading.Event()
        lifetime_ms = -1 if max_lifetime_s is None else max(1, int(max_lifetime_s * 1000))
        created = self._request(CreateDelegationTokenRequest(max_lifetime_ms=lifetime_ms))
        self.token_id: str = created.token_id
        self._hmac = bytes(created.hmac)
        self._issued_ms: int = created.issue_timestamp_ms
        self.expires_ms: int = created.expiry_timestamp_ms  # as last reported
        self.max_ms: int = created.max_timestamp_ms
        mechanism = security.get("sasl.mechanisms", "")
        other_options = {
            str(name): str(value) for name, value in options.items() if not str(name).lower().startswith("kafka.sasl.")
        }
        self.options: dict[str, str] = {
            **other_options,
            "kafka.sasl.mechanism": mechanism if mechanism in scram.MECHANISMS else "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": client.jaas_config(
                "scram.ScramLoginModule", self.token_id, base64.b64encode(self._hmac).decode(), is_token=True
            ),
        }
        self._renewer = threading.Thread(target=self._keep_renewing, name="delegation-token", daemon=True)
        self._renewer.start()

    def __enter__(self) -> DelegationToken:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Makes the token expire: queries that still use it fail when they reconnect."""
        self._stopped.set()
        self._renewer.join()
        try:
            self._request(ExpireDelegationTokenRequest(hmac=self._hmac, expiry_time_period_ms=-1))
        except (OSError, ProtocolError, MqdReadError) as error:
            log.warning(
                "the delegation token %s was not expired explicitly; it expires by itself: %s", self.token_id, error
            )
        self._cluster.close()

    def renew(self) -> None:
        """Raises OSError, ProtocolError, MqdReadError."""
        self.expires_ms = self._request(
            RenewDelegationTokenRequest(hmac=self._hmac, renew_period_ms=-1)
        ).expiry_timestamp_ms

    def _keep_renewing(self) -> None:
        """Renews after two thirds of each period, until no further renewal is possible."""
        began_ms = self._issued_ms
        while self.expires_ms < self.max_ms:
            due_ms = began_ms + (self.expires_ms - began_ms) * 2 // 3
            if self._stopped.wait(max(0.0, due_ms / 1000 - time.time())):
                return
            began_ms = int(time.time() * 1000)
            try:
                self.renew()
            except (OSError, ProtocolError, MqdReadError) as error:  # X2
                if began_ms > self.expires_ms:
                    log.error("the delegation token %s has expired: %s", self.token_id, error)
                    return
                log.warning("the delegation token %s could not be renewed; retrying: %s", self.token_id, error)
                if self._stopped.wait(RETRY_S):
                    return

    def _request(self, request: object) -> Any:
        """An unanswered request is sent once more, on a new connection, because the old one may
        have ended in the meantime.
        """
        try:
            response = self._cluster.any_connection().request(request)
        except OSError:
            self._cluster.close()
            response = self._cluster.any_connection().request(request)
        if response.error_code:
            code = response.error_code
            raise MqdReadError(f"delegation token: {error_name(code)}: {error_message(code)}")
        return response
