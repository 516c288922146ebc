"""The arguments of handlers: the broker with its services, and one request's view of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd import native
from mqd.acceptor.broker_state import BrokerState, Origin
from mqd.cluster.host import audited, messages
from mqd.security.acl import CLUSTER_NAME

if TYPE_CHECKING:
    from mqd.acceptor.coordinators import Coordinators
    from mqd.acceptor.dead_letters import DeadLetters
    from mqd.acceptor.local.relay import Relaying
    from mqd.acceptor.transactions import TransactionService


class Broker(BrokerState):
    """The broker's state and the services that use it."""

    # the first three are set before the first request, if this process has a Link to the workers
    coordinators: Coordinators | None = None
    transactions: TransactionService | None = None
    dead_letters: DeadLetters | None = None
    relaying: Relaying | None = None  # set if the cluster may have other hosts


class Context:
    """One request's view of the broker."""

    __slots__ = ("origin", "authenticated_as", "broker", "delay_s", "ends_connection", "is_cacheable")

    def __init__(self, broker: Broker, origin: Origin) -> None:
        self.broker = broker
        self.origin = origin
        # Set by a handler. True: as long as this host has its lease, the response depends only on
        # the request's bytes and the metadata version.
        self.is_cacheable = False
        # Set by the handler that ends a SASL exchange: (principal, session length in ms or 0 =
        # unlimited, how the principal was authenticated). The worker accepts the connection's
        # requests from then on.
        self.authenticated_as: tuple[str, int, native.PrincipalKind] | None = None
        # Set by a handler whose response is the connection's last.
        self.ends_connection = False
        # Set by a handler to delay its response; the request is not kept in the meantime.
        self.delay_s = 0.0

    # -- rights ------------------------------------------------------------------------------------

    def authorize(
        self, operation: int, resource_type: int, name: str = CLUSTER_NAME, named_in_request: bool = True
    ) -> bool:
        """Whether the client may do the operation. `named_in_request` False: the client's request does
        not name the resource, so a refusal is not logged as a denial. Hosts of the cluster may do
        everything.
        """
        rules, origin = self.broker.authorizer, self.origin
        if rules is None or origin.is_trusted:
            return True
        if rules.allows(origin.principal, origin.peer_ip, operation, resource_type, name):
            return True
        only_logged = self.broker.denials_only_logged
        if named_in_request:
            self.broker.audit.record_denial(
                origin.principal, origin.peer_ip, operation, resource_type, name, only_logged
            )
        return only_logged

    async def change(self, change: messages.Change, timeout_ms: int) -> messages.Response:
        """Asks the controller to change ACLs, users or tokens; writes the change to the audit log."""
        response = await self.broker.controller.request(change, timeout_ms)
        for event, fields in audited.lines(change, response):
            self.broker.audit.write(event, by=self.origin.principal, **fields)
        return response

    def authorize_any(self, operation: int, resource_type: int) -> bool:
        """Whether the client may do the operation on at least one resource of the type (KIP-679)."""
        rules, origin = self.broker.authorizer, self.origin
        return (
            rules is None
            or self.broker.denials_only_logged
            or rules.allows_any(origin.principal, origin.peer_ip, operation, resource_type)
        )

    def authorized_operations(self, resource_type: int, name: str, supported: int) -> int:
        """The operations that the client may do, of those that the resource supports (KIP-430)."""
        rules, origin = self.broker.authorizer, self.origin
        if rules is None or self.broker.denials_only_logged:
            return supported
        return supported & rules.allowed_operations(origin.principal, origin.peer_ip, resource_type, name)


class CloseConnection(Exception):
    """This request has no response: its connection is closed and the reason is logged."""
