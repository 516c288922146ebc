"""Converts the broker's properties to options of the cluster's cores."""

from collections.abc import Mapping

from mqd.base.config import broker_value
from mqd.cluster.metadata.options import ControllerOptions
from mqd.cluster.raft.events import QuorumSettings


def _number(config: Mapping[str, str], name: str) -> int:
    value = broker_value(config, name)
    assert isinstance(value, int)
    return value


def controller_options(config: Mapping[str, str]) -> ControllerOptions:
    balances = broker_value(config, "auto.leader.rebalance.enable")
    return ControllerOptions(
        session_ms=_number(config, "broker.session.timeout.ms"),
        heartbeat_ms=_number(config, "broker.heartbeat.interval.ms"),
        replication_recovery_delay_ms=_number(config, "replication.recovery.delay.ms"),
        replica_moves_max=_number(config, "replica.moves.max"),
        shutdown_moves_max=_number(config, "controlled.shutdown.transfers.max"),
        shutdown_wait_ms=_number(config, "controlled.shutdown.wait.ms"),
        retire_barrier_ms=_number(config, "partition.retire.barrier.ms"),
        retire_grace_ms=_number(config, "partition.retire.grace.ms"),
        unclean_elections=broker_value(config, "unclean.leader.election.enable") is True,
        token_check_ms=_number(config, "delegation.token.expiry.check.interval.ms"),
        leader_balance_check_ms=_number(config, "leader.imbalance.check.interval.seconds") * 1000,
        leader_imbalance_percent=_number(config, "leader.imbalance.per.broker.percentage") if balances else 100,
    )


def quorum_settings(config: Mapping[str, str]) -> QuorumSettings:
    return QuorumSettings(promise_ns=_number(config, "controller.quorum.fetch.timeout.ms") * 1_000_000)
