"""Publishes this host's schedules to its timer, and has supervisord start the timer when needed.

As long as no topic has schedule.to, the timer does not run: the program is in supervisord's
configuration, without autostart. The acceptor rewrites run/schedules.json
(mqd/base/schedule_files.py) whenever the schedules change, and asks the supervisord that runs the
acceptor to start the timer. supervisord's address and the program's name come from the environment.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mqd.acceptor.metadata import Metadata
from mqd.base import logging, schedule_files
from mqd.base.blocking_queries import in_thread
from mqd.base.schedule_files import Schedules, ScheduleTopic
from mqd.cluster.host import messages

START_RETRY_S = 30.0
_ALREADY_STARTED = 60  # supervisor.xmlrpc.Faults
log = logging.get("acceptor.schedules")


def schedules_of(metadata: Metadata, node_id: int) -> list[ScheduleTopic]:
    """All schedules of the cluster. `led` is empty where this host leads no partition."""
    schedules = []
    for topic in metadata.topics.values():
        target = topic.config.get("schedule.to", "")
        if target:
            led = {
                partition.index: partition.leader_epoch
                for partition in metadata.visible_partitions(topic)
                if partition.leader == node_id
            }
            delay_ms = int(topic.config.get("schedule.delay.ms", "0"))
            schedules.append(ScheduleTopic(topic.name, topic.topic_id, target, delay_ms, led))
    return schedules


class TimerStarter:
    def __init__(
        self, config: Mapping[str, str], metadata: Metadata, node_id: int, run_dir: Path, start: Callable[[], None]
    ) -> None:
        """`start` blocks; raises OSError or xmlrpc.client.Error."""
        self._config = {name: config[name] for name in schedule_files.CONFIG_NAMES if name in config}
        self._metadata, self._node_id, self._run_dir, self._start = metadata, node_id, run_dir, start
        self._published: Schedules | None = None
        self._has_schedules = False
        self._is_starting = False
        self._retry: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._publish()

    def stop(self) -> None:
        self._cancel_retry()
        self._loop = None

    def on_metadata(self, message: messages.FromController) -> None:
        """Called after `message` was applied to the metadata."""
        if self._loop is not None and self._may_change_schedules(message):
            self._publish()

    def _may_change_schedules(self, message: messages.FromController) -> bool:
        match message:
            case messages.MessageList():
                return any(map(self._may_change_schedules, message.parts))
            case messages.TopicPut():
                return self._has_schedules or bool(message.topic.config.get("schedule.to"))
            case messages.PartitionsPut() | messages.TopicRemoved():
                return self._has_schedules
            case messages.Image():
                return True
        return False

    def _publish(self) -> None:
        topics = schedules_of(self._metadata, self._node_id)
        self._has_schedules = bool(topics)
        schedules = Schedules(self._config, topics)
        is_written = True
        self._cancel_retry()
        if schedules != self._published and (topics or (self._run_dir / schedule_files.SCHEDULES).exists()):
            try:
                schedule_files.write(self._run_dir, schedule_files.SCHEDULES, schedules)
                schedule_files.wake(self._run_dir)
                self._published = schedules
            except OSError as error:
                is_written = False
                log.error("changed schedules cannot be written for the timer; retrying", reason=str(error))
        is_needed = self._published is not None and any(topic.led for topic in self._published.topics)
        if self._loop is not None and (is_needed or not is_written):
            self._retry = self._loop.call_later(START_RETRY_S, self._publish)
        if self._loop is not None and is_needed:
            self._start_timer()

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _start_timer(self) -> None:
        if self._is_starting:  # supervisord may take long to respond; there will be a retry
            return
        try:
            in_thread(self._start).add_done_callback(self._on_started)
            self._is_starting = True
        except RuntimeError as error:  # no thread can be started
            self._log_start_failure(error)

    def _on_started(self, outcome: asyncio.Future[None]) -> None:
        self._is_starting = False
        if not outcome.cancelled() and (error := outcome.exception()) is not None:
            self._log_start_failure(error)

    def _log_start_failure(self, error: BaseException) -> None:
        log.error(
            "the timer cannot be started, so scheduled records are not delivered; start mqd-timer with supervisorctl",
            reason=str(error),
        )


def start_by_supervisord(environment: Mapping[str, str] = os.environ) -> None:
    """Starts the timer unless it is running. Blocks. Raises OSError and xmlrpc.client.Error."""
    import xmlrpc.client

    from supervisor.xmlrpc import SupervisorTransport

    address, own_name = environment.get("SUPERVISOR_SERVER_URL", ""), environment.get("SUPERVISOR_PROCESS_NAME", "")
    if not address or not own_name.endswith("acceptor"):
        raise OSError("supervisord has no address (unix_http_server in its configuration)")
    # the URL is not used: the transport has the address
    server = xmlrpc.client.ServerProxy("http://127.0.0.1", SupervisorTransport(None, None, address))
    name = own_name.removesuffix("acceptor") + "timer"
    try:
        server.supervisor.startProcess(name, False)
    except xmlrpc.client.Fault as fault:
        if fault.faultCode != _ALREADY_STARTED:
            raise
