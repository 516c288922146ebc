"""Creates a share consumer's runner and its channels."""

from __future__ import annotations

import os
from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import NamedTuple

from mqd.base.property_values import ConfigError
from mqd.client.config import Settings, TransportChoice
from mqd.client.messages import KafkaError, KafkaException, failure
from mqd.client.share.channels import AttachmentChannel, Channel, TcpChannel
from mqd.client.share.core import Settings as CoreSettings
from mqd.client.share.core import ShareCore
from mqd.client.share.events import Target
from mqd.client.share.runner import ShareRunner
from mqd.client.share.share_config import ShareConfig
from mqd.client.shm.attachment import Attachment
from mqd.client.shm.opening import opener
from mqd.security.client import ClientSecurity, security_from_properties
from mqd.shm import rendezvous

REQUEST_BYTES = 1 << 20
RECORDS_BYTES = 4 << 20
CONTROL_BYTES = 64 << 10

OpenChannel = Callable[[Target], Channel]


class OpenedRunner(NamedTuple):
    runner: ShareRunner
    credentials: dict[str, str]  # override those in the settings for later connections
    choice: TransportChoice  # the transport in use


def open_share_runner(settings: Settings, config: ShareConfig, choice: TransportChoice) -> OpenedRunner:
    """With transport=auto, uses TCP if attaching to the broker of `choice` fails: the broker may have
    exited in the meantime, and TCP connections are retried. Raises KafkaException.
    """
    member_id = urlsafe_b64encode(os.urandom(16)).rstrip(b"=").decode()  # KIP-1082, in Kafka's id format
    core = ShareCore(
        CoreSettings(
            config["group.id"],
            member_id,
            config["client.rack"] or None,
            config["max.poll.interval.ms"],
            max(config["topic.metadata.refresh.interval.ms"], 1_000),
            bool(config["check.crcs"]),
            bool(config["allow.auto.create.topics"]),
        )
    )
    servers = rendezvous.addresses_of(str(config["bootstrap.servers"]))
    if choice.transport == "tcp" and not servers:
        raise failure(KafkaError._INVALID_ARG, "bootstrap.servers has no broker")
    credentials: dict[str, str] = {}
    open_tcp_channel = _opener_over_tcp(settings, config, core, credentials)
    open_channel: OpenChannel = open_tcp_channel
    attachment_channels: list[Channel] = []
    if choice.transport == "shm":
        try:
            open_channel, attachment_channels = _opener_over_shared_memory(
                settings, config, choice, core, open_tcp_channel
            )
        except (KafkaException, OSError) as error:
            if settings.own["transport"] == "shm" or not servers:
                raise
            reason = error.args[0] if isinstance(error, KafkaException) else error
            choice = TransportChoice("tcp", None, f"shared memory is not available: {reason}")
    return OpenedRunner(ShareRunner(core, open_channel, attachment_channels), credentials, choice)


def _opener_over_tcp(
    settings: Settings, config: ShareConfig, core: ShareCore, credentials: dict[str, str]
) -> OpenChannel:
    servers = rendezvous.addresses_of(str(config["bootstrap.servers"]))
    properties = {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in settings.rdkafka.items()
        if value is not None
    }

    def get_security() -> ClientSecurity:
        return security_from_properties({**properties, **credentials})

    try:
        get_security().check()
    except ConfigError as error:
        raise failure(KafkaError._INVALID_ARG, str(error)) from error

    def open_channel(target: Target) -> Channel:
        def get_addresses() -> list[tuple[str, int]]:
            if target.node_id < 0:
                return [*servers, *core.nodes.values()]
            address = core.nodes.get(target.node_id)
            return [] if address is None else [address]

        name = f"{target.kind}-{target.node_id}" if target.node_id >= 0 else target.kind
        return TcpChannel(name, get_addresses, config["client.id"], config["socket.timeout.ms"] / 1000, get_security)

    return open_channel


def _opener_over_shared_memory(
    settings: Settings, config: ShareConfig, choice: TransportChoice, core: ShareCore, open_tcp_channel: OpenChannel
) -> tuple[OpenChannel, list[Channel]]:
    """Uses shared memory for this host's broker, TCP for other hosts. There are two attachments, because
    a heartbeat on the same one would wait for the response to a parked fetch. Both attach only to this
    broker, even if bootstrap.servers has others, since a share session exists only on the partition's
    leader. Also returns the channels of the attachments, which must be closed even if no request has
    used them.
    """
    settings = settings._replace(own={**settings.own, "mqd.socket.path": choice.socket_path})

    def create_attachment(name: str, reply_bytes: int) -> Attachment:
        client_id = config["client.id"]
        attach = opener(settings, choice, client_id, REQUEST_BYTES, reply_bytes, REQUEST_BYTES)
        return Attachment(
            attach,
            client_id=client_id if name == "requests" else f"{client_id}-{name}",
            request_timeout_s=config["socket.timeout.ms"] / 1000,
        )

    request_attachment = create_attachment("requests", CONTROL_BYTES)
    try:
        share_channel = AttachmentChannel(create_attachment("share", RECORDS_BYTES))
    except BaseException:
        request_attachment.close()
        raise

    def is_local(node_id: int) -> bool:
        if len(core.nodes) <= 1:
            return True
        host, port = core.nodes.get(node_id, ("", 0))
        return bool(host) and _is_same_path(rendezvous.find_at(host, port).path, choice.socket_path)

    def open_channel(target: Target) -> Channel:
        if target.node_id >= 0 and not is_local(target.node_id):
            return open_tcp_channel(target)
        if target.kind == "share":
            return share_channel
        return AttachmentChannel(request_attachment, open_tcp_channel(target) if target.node_id < 0 else None)

    return open_channel, [AttachmentChannel(request_attachment), share_channel]


def _is_same_path(left: str | None, right: str | None) -> bool:
    return left is not None and right is not None and os.path.realpath(left) == os.path.realpath(right)
