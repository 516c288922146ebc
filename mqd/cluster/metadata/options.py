"""What the active controller and the brokers agree on: times and bounds. Times in milliseconds."""

import msgspec


class ControllerOptions(msgspec.Struct, frozen=True):
    """Defaults are those of docs/configuration.md. `mutants` names rules that are switched off:
    only the simulator sets it, to prove that its checkers see.
    """

    session_ms: int = 6_000  # broker.session.timeout.ms: a broker that was not heard for so long is fenced
    heartbeat_ms: int = 1_000  # broker.heartbeat.interval.ms
    # a broker acts as a leader so much of a session after it sent the heartbeat that was answered:
    # it ends before it is fenced
    lease_share: float = 0.75
    replication_delay_ms: int = 600_000  # a lost host's replicas get a new home after this; -1 = never
    drain_moves_max: int = 50  # replica.moves.max: partitions that mqd itself moves at a time
    balance_check_ms: int = 300_000  # leader.imbalance.check.interval.seconds
    balance_percent: int = 10  # leader.imbalance.per.broker.percentage
    balance_stable_ms: int = 60_000  # a broker that was fenced less long ago gets no leadership back
    balance_moves_max: int = 100  # leaderships moved per tick
    # controlled.shutdown.moves.max: leaderships moved per heartbeat of a broker that wants to shut
    # down
    shutdown_moves_max: int = 1_000
    shutdown_wait_ms: int = 30_000  # controlled.shutdown.wait.ms: then it may end although not everybody knows
    # partition.retire.barrier.ms: how long producers to retired partitions wait for consumers
    # before their records go elsewhere
    retire_barrier_ms: int = 10_000
    # partition.retire.grace.ms: how long emptied partitions, hidden from Metadata, still take in
    # what producers with old metadata send
    retire_grace_ms: int = 600_000
    # unclean.leader.election.enable of this host's file: for topics of which the metadata say nothing
    unclean_elections: bool = False
    register_retry_ms: int = 200  # a broker asks again
    # R6 R6b R8_ELR R9 R10 KIP903 UNCLEAN R14 L2_SESSION PROOF_BROKER PROOF_CONTROLLER (see the
    # rules' heads)
    mutants: frozenset[str] = frozenset()


DEFAULTS = ControllerOptions()
