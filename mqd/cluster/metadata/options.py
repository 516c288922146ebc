"""Times and bounds that the active controller and the brokers share. Times in milliseconds."""

import msgspec


class ControllerOptions(msgspec.Struct, frozen=True):
    """The defaults are those of docs/configuration.md, except session_ms."""

    # broker.session.timeout.ms: a broker that is silent for this long is fenced
    session_ms: int = 6_000
    heartbeat_ms: int = 1_000  # broker.heartbeat.interval.ms
    # The lease of a broker, as a fraction of its session. It runs from the time at which the broker sent
    # the heartbeat, so it ends before the broker is fenced.
    lease_share: float = 0.75
    # replication.recovery.delay.ms: a lost host's replicas are placed elsewhere after this delay;
    # -1 = never
    replication_recovery_delay_ms: int = 600_000
    # replica.moves.max: partitions that mqd itself moves at the same time
    replica_moves_max: int = 50
    leader_balance_check_ms: int = 300_000  # leader.imbalance.check.interval.seconds
    leader_imbalance_percent: int = 10  # leader.imbalance.per.broker.percentage
    # a broker gets leaderships back only after it has been unfenced for this long
    leader_balance_stable_ms: int = 60_000
    leader_moves_max: int = 100  # leaderships moved per tick
    # controlled.shutdown.transfers.max: leaderships moved per heartbeat of a broker that is shutting
    # down
    shutdown_moves_max: int = 1_000
    # controlled.shutdown.wait.ms: how long that broker waits until all hosts know the new leaders
    shutdown_wait_ms: int = 30_000
    # partition.retire.barrier.ms: how long producers to retired partitions wait for consumers
    # before their records are redirected
    retire_barrier_ms: int = 10_000
    # partition.retire.grace.ms: how long emptied partitions, hidden from Metadata, still accept
    # records from producers with old metadata
    retire_grace_ms: int = 600_000
    # unclean.leader.election.enable in this host's configuration file: for topics that do not set it
    unclean_elections: bool = False
    # delegation.token.expiry.check.interval.ms: how often expired tokens are removed
    token_check_ms: int = 3_600_000
    register_retry_ms: int = 200  # retry interval of a broker's registration


DEFAULTS = ControllerOptions()
