"""Parts of the responses to changes (messages.Response)."""

import msgspec


class PartitionResult(msgspec.Struct, frozen=True):
    """One partition's result in the response to a change of several partitions."""

    name: str
    partition: int
    error: int = 0
    message: str | None = None
    replicas: list[int] = []  # BalanceReplicas: the target


class UserResult(msgspec.Struct, frozen=True):
    """The result for one user of AlterScramCredentials."""

    user: str
    error: int = 0
    message: str | None = None


class QuorumReplica(msgspec.Struct, frozen=True):
    node_id: int
    directory_id: bytes  # 16 bytes
    log_end_offset: int
    last_fetch_ms: int = -1  # wall clock, -1 = not known
    last_caught_up_ms: int = -1
    host: str = ""  # address of its controller listener
    port: int = 0


class QuorumImage(msgspec.Struct, frozen=True):
    leader_id: int
    leader_epoch: int
    high_watermark: int
    voters: list[QuorumReplica]
    observers: list[QuorumReplica]
    fetch_timeout_ms: int = 0  # controller.quorum.fetch.timeout.ms of the leader; 0 = not given
