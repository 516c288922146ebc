"""The privileges that the processes of a running broker drop, and their log lines about it."""

from __future__ import annotations

import resource
from pathlib import Path

from tests.broker import LOOKED_INTO, Broker


def _words(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


def test_each_process_logs_the_privileges_that_it_dropped(shared_broker: Broker) -> None:
    processes = [one for one in shared_broker.status()["processes"] if one["role"] != "supervisord"]
    assert {one["role"] for one in processes} == {"keeper", "acceptor", "controller", "worker"}
    for one in processes:
        said = one["confinement"].split(", ")
        if not LOOKED_INTO:
            assert said.pop(0) == "no core files"
            assert resource.prlimit(one["pid"], resource.RLIMIT_CORE) == (0, 0)
        assert said[0] == "no new privileges", one
        assert _words(one["pid"], "NoNewPrivs") == "1"
        assert (_words(one["pid"], "Seccomp") == "2") == ("seccomp" in said)
        if one["role"] == "keeper":
            assert "Landlock" not in said
    log = (shared_broker.data_dir / "logs" / "mqd-worker-0.log").read_text()
    assert f'process confined  in_force="{processes[-1]["confinement"]}"' in log


def test_a_broker_without_confinement(start_broker) -> None:
    broker = start_broker(config={"process.sandbox": "off", "core.files.allow": "true"}, workers=1)
    for one in broker.status()["processes"]:
        if one["role"] not in ("supervisord", "keeper"):
            assert one["confinement"] == "nothing"
            assert (_words(one["pid"], "NoNewPrivs"), _words(one["pid"], "Seccomp")) == ("0", "0")
