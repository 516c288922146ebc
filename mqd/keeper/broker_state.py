"""The state of the broker's processes as the keeper tracks it, reported to tools that query the
keeper and in run/broker.json.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import Any

import msgspec

from mqd.base import cluster_config, listeners, logging, restarts, schedule_files
from mqd.base.clock import now_ms
from mqd.keeper.resources import Resources
from mqd.keeper.settings import Settings
from mqd.shm.keeper_messages import ProcessStatus, Status

TIMER_NAME = "mqd-timer"

log = logging.get("keeper")


class Process(msgspec.Struct):
    """The process with one role and index, such as worker 2. After a restart the same object
    describes the successor.
    """

    name: str
    role: str
    index: int
    endpoint: int  # its number among the endpoints of the shared memory
    state: str = "starting"  # starting | running | dead
    pid: int = 0
    pidfd: int = -1  # -1 = no live process
    connection: socket.socket | None = None
    detail: str = ""  # from its Ready, such as "metrics_port=9404"
    confinement: str = ""  # the restrictions in force, from its Ready
    started_ms: int = 0  # Unix time
    restart_count: int = -1  # the first start is not a restart
    generation: int = 0  # of its endpoint; a death increases it
    notices: deque[Any] = msgspec.field(default_factory=deque)  # not yet accepted by the socket
    answered_s: float = 0.0  # time.monotonic() of its last response to a Probe
    is_probed: bool = False  # a Probe is in flight: no further one is sent
    death_times_s: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=8))  # time.monotonic()


class BrokerState:
    """The processes of this broker, by role and index."""

    def __init__(self, settings: Settings, resources: Resources, supervisor_pid: int, supervisor_is_own: bool = True):
        self.confinement = ""  # of the keeper itself: the restrictions in force (mqd/security/confinement.py)
        self.settings = settings
        self.resources = resources
        self.supervisor_pid = supervisor_pid
        # False: supervisord also runs other programs; the broker neither lists nor stops it
        self.supervisor_is_own = supervisor_is_own
        self.started_ms = now_ms()
        worker_count = settings.worker_count
        self.processes = [
            *(Process(f"mqd-worker-{index}", "worker", index, index) for index in range(worker_count)),
            Process("mqd-acceptor", "acceptor", 0, worker_count),
            Process("mqd-controller", "controller", 0, worker_count + 1),
        ]
        self._by_role = {(process.role, process.index): process for process in self.processes}
        self._waiting_for = ""  # shown while the broker is not ready
        self._shutdown_reason: str | None = None  # None: the broker is not shutting down

    # -- status ------------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        return self._shutdown_reason is None and all(process.state == "running" for process in self.processes)

    def process_statuses(self) -> list[ProcessStatus]:
        statuses = [ProcessStatus("mqd-keeper", "keeper", os.getpid(), "running", self.started_ms, 0, self.confinement)]
        if self.supervisor_pid and self.supervisor_is_own:
            statuses.insert(
                0, ProcessStatus("supervisord", "supervisord", self.supervisor_pid, "running", self.started_ms, 0)
            )
        processes = sorted(self.processes, key=lambda process: (process.role, process.index))
        return statuses + [
            # pid 0 for a process that has ended: another one may have its pid by now
            ProcessStatus(
                process.name,
                process.role,
                process.pid if process.pidfd >= 0 else 0,
                process.state,
                process.started_ms,
                max(0, process.restart_count),
                process.confinement,
            )
            for process in processes
            if process.pid
        ]

    def _timer_statuses(self) -> list[ProcessStatus]:
        """The timer, which the acceptor starts through supervisord when there are schedules. The
        keeper does not watch it.
        """
        run_dir = self.settings.places.run_dir
        timer = schedule_files.timer_process(run_dir)
        if timer is None:
            return []
        counts = (restarts.read(run_dir) or {}).get(TIMER_NAME, {})
        pid, started_ms = timer
        return [ProcessStatus(TIMER_NAME, "timer", pid, "running", started_ms, sum(counts.values()))]

    def status(self) -> Status:
        control = self.resources.control
        host, port = self.resources.addresses[0]
        local_usage = [control.local_usage(worker) for worker in range(self.settings.worker_count)]
        return Status(
            ready=self.is_ready(),
            host=host,
            port=port,
            started_ms=self.started_ms,
            data_dir=str(self.settings.places.data_dir),
            processes=[*self.process_statuses(), *self._timer_statuses()],
            connections=[control.connection_count(worker) for worker in range(self.settings.worker_count)],
            partitions=control.partition_counts(),
            log_level=logging.level_name(control.log_level),
            metrics_port=self._metrics_port(),
            metrics_url=self._metrics_url(),
            local_clients=[clients for clients, _ in local_usage],
            local_bytes=[size_bytes for _, size_bytes in local_usage],
            client_socket=str(self.settings.places.client_socket) if self.resources.local_listener is not None else "",
        )

    def _metrics_port(self) -> int:
        detail = self._by_role["acceptor", 0].detail
        name, _, value = detail.partition("=")
        return int(value) if name == "metrics_port" and value.isdigit() else 0

    def _metrics_url(self) -> str:
        listener, port = listeners.metrics_listener(self.settings.config), self._metrics_port()
        if listener is None or not port:
            return ""
        host = f"[{listener.host}]" if ":" in listener.host else listener.host or "0.0.0.0"
        return f"{'https' if listener.has_tls else 'http'}://{host}:{port}/metrics"

    def _publish(self) -> None:
        """Writes run/broker.json, for people and tools that do not query the keeper; the broker
        itself never reads it.
        """
        path = self.settings.places.broker_json
        host, port = self.resources.addresses[0]
        cluster = self.resources.cluster
        document = {
            "generation": self.resources.generation,
            "cluster_id": self.resources.identity.cluster_id,
            "node_id": self.resources.identity.node_id,
            "host": host,
            "port": port,
            "listeners": self.resources.addresses,
            "clustered": cluster_config.listens_for_hosts(self.settings.config),
            "seeds": cluster_config.seeds(self.settings.config),
            "controller_listener": cluster.controller_advertised if cluster is not None else None,
            "started_ms": self.started_ms,
            "ready": self.is_ready(),
            "waiting": "" if self.is_ready() else self._waiting_for,
            "ending": self._shutdown_reason,
            "processes": self.process_statuses(),
        }
        try:
            temporary = path.with_suffix(".new")
            temporary.write_bytes(msgspec.json.encode(document) + b"\n")
            os.replace(temporary, path)
        except OSError as error:
            log.warning("broker.json could not be written", error=error.strerror)
