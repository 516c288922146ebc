"""The keeper's status, and that of `mqd status`, for processes that have ended."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from mqd.cli.verbs import status as status_verb
from mqd.keeper.broker_state import BrokerState
from mqd.shm.keeper_messages import Status


@pytest.fixture
def broker() -> BrokerState:
    settings = SimpleNamespace(worker_count=2)
    return BrokerState(settings, SimpleNamespace(), 0)  # type: ignore[arg-type]


def test_a_process_that_has_ended_has_no_pid(broker: BrokerState, capsys: pytest.CaptureFixture[str]) -> None:
    lives, ended, never = broker.processes[0], broker.processes[1], broker.processes[2]
    lives.pid, lives.pidfd, lives.state = 4711, 5, "running"
    ended.pid, ended.pidfd, ended.state, ended.restart_count = 4712, -1, "dead", 2
    found = {one.name: one for one in broker.process_statuses()}
    assert found["mqd-worker-0"].pid == 4711 and found["mqd-keeper"].pid == os.getpid()
    assert (found["mqd-worker-1"].pid, found["mqd-worker-1"].state) == (0, "dead")
    assert never.name not in found

    shown = status_verb._as_json(
        Status(
            ready=False,
            host="127.0.0.1",
            port=1,
            started_ms=0,
            data_dir="/d",
            processes=list(found.values()),
            connections=[0, 0],
            partitions=[0, 0],
            log_level="info",
            metrics_port=0,
            client_socket="",
            local_clients=[0, 0],
            local_bytes=[0, 0],
        )
    )
    dead = next(one for one in shown["processes"] if one["state"] == "dead")
    assert dead["pid"] is None and dead["uptime_s"] is None
    status_verb._show(shown)
    out = capsys.readouterr().out
    assert "4711" in out and "4712" not in out
    (line,) = [line for line in out.splitlines() if "mqd-worker-1" in line]
    assert line.split()[:5] == ["mqd-worker-1", "-", "dead", "-", "2"]
