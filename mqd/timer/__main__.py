"""`python -m mqd.timer`: delivers the records of this host's schedules when they are due. The data
directory comes from MQD_DATA_DIR.

It is a client of the broker on its host, and runs as the broker's user. The acceptor starts it,
through supervisord, when there is a topic with schedule.to, and publishes which partitions this
host leads (mqd/base/schedule_files.py). It may be killed at any time.

Exit status: 0 after SIGTERM, when the broker is stopped, and when no schedule is left; otherwise 1.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mqd.base import logging, paths, schedule_files
from mqd.base.schedule_files import ScheduleTopic
from mqd.security import confinement

if TYPE_CHECKING:
    from mqd.timer.partition import PartitionTimer

ENDING_S = 0.1  # how often to check whether stopped threads have ended
STATUS_S = 1.0  # shortest time between two writes of run/timer.json
IDLE_S = 60.0  # the process ends after this time without a schedule
JOIN_S = 5.0  # how long stop() waits for the threads
START_S = 1.0  # supervisord.conf's startsecs: an earlier exit is a failed start
KEPT_BYTES_MAX = 64 << 20  # memory for records that are due soon, for all partitions together


class Timer:
    """Runs a PartitionTimer for each schedule partition that this host leads. `wake`, callable from
    any thread, makes the process call update() again.
    """

    def __init__(self, layout: paths.Layout, wake: Callable[[], None] = lambda: None) -> None:
        self._layout = layout
        self._wake = wake
        self._wanted: dict[tuple[bytes, int], ScheduleTopic] = {}
        self._timers: dict[tuple[bytes, int], PartitionTimer] = {}
        self._ending: dict[tuple[bytes, int], PartitionTimer] = {}
        self._schedules_version: tuple[int, int] | None = None  # inode and mtime of run/schedules.json
        self._last_wanted_at = time.monotonic()
        self._status_at = 0.0
        self._status_changed = False  # since it was last published

    def update(self) -> bool:
        """Starts and stops partitions according to run/schedules.json. Returns False if there
        has been no schedule for IDLE_S.
        """
        try:
            file_status = (self._layout.run_dir / schedule_files.SCHEDULES).stat()
            version = file_status.st_ino, file_status.st_mtime_ns
        except FileNotFoundError:
            version = 0, 0
        if version != self._schedules_version:
            self._schedules_version = version
            self._set_wanted(schedule_files.read_schedules(self._layout.run_dir).topics)
        now = time.monotonic()
        self._ending = {key: timer for key, timer in self._ending.items() if not timer.join(0)}
        self._start()
        if self._status_changed and now - self._status_at >= STATUS_S:
            self._status_at, self._status_changed = now, False
            self._publish()
        if self._timers or self._ending:
            self._last_wanted_at = now
        return now - self._last_wanted_at < IDLE_S

    def wait_s(self) -> float | None:
        """How long to wait for the next update() if not woken before; None: until woken."""
        if self._ending:
            return ENDING_S
        now = time.monotonic()
        if self._status_changed:
            return max(0.0, self._status_at + STATUS_S - now)
        return None if self._timers else max(0.0, self._last_wanted_at + IDLE_S - now)

    def _on_status(self) -> None:
        """Called, in any thread, when the status of a partition has changed."""
        if not self._status_changed:
            self._status_changed = True
            self._wake()

    def _set_wanted(self, topics: list[ScheduleTopic]) -> None:
        wanted = self._wanted = {(topic.topic_id, index): topic for topic in topics for index in topic.led}
        self._remove_deleted_indexes(topics)
        for key, timer in list(self._timers.items()):
            if wanted.get(key) is None or _must_restart(wanted[key], timer.topic, key[1]):
                timer.stop()
                self._ending[key] = self._timers.pop(key)
        self._status_changed = True

    def _start(self) -> None:
        """Starts the partitions that are wanted. A partition waits while its earlier timer has not
        ended: both would write the same files.
        """
        for key, topic in self._wanted.items():
            if key in self._timers or key in self._ending:
                continue
            from mqd.timer.partition import PartitionTimer  # the client library: only where there are schedules

            timer = PartitionTimer(
                topic,
                key[1],
                self._layout.client_socket,
                self._layout.data_dir,
                KEPT_BYTES_MAX // len(self._wanted),
                self._on_status,
            )
            self._timers[key] = timer
            self._status_changed = True
            timer.start()

    def _remove_deleted_indexes(self, topics: list[ScheduleTopic]) -> None:
        """Removes the indexes of deleted topics. The others stay: this host may lead their
        partitions again.
        """
        kept = {topic.topic_id.hex() for topic in topics}
        with contextlib.suppress(OSError):
            for path in (self._layout.data_dir / "timer").iterdir():
                if path.name.partition("-")[0] not in kept:
                    shutil.rmtree(path, ignore_errors=True)

    def _publish(self) -> None:
        try:
            statuses = [timer.status for timer in self._timers.values()]
            schedule_files.write(self._layout.run_dir, schedule_files.STATUS, statuses)
        except OSError:
            pass  # with a full disk the metrics page stays outdated

    def stop(self) -> None:
        timers = [*self._timers.values(), *self._ending.values()]
        for timer in timers:
            timer.stop()
        deadline = time.monotonic() + JOIN_S
        for timer in timers:
            timer.join(max(0.0, deadline - time.monotonic()))


def _must_restart(wanted: ScheduleTopic, current: ScheduleTopic, partition: int) -> bool:
    """Whether the partition's timer must be restarted. A change of the leader epoch is one reason:
    another host may have led the partition in between.
    """
    return (wanted.target, wanted.delay_ms, wanted.led[partition]) != (
        current.target,
        current.delay_ms,
        current.led[partition],
    )


def _wake(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):  # already signalled
        os.write(fd, b"\0")


def main() -> int:
    started_at = time.monotonic()
    paths.keep_private()
    layout = paths.layout(paths.default_data_dir())
    config = schedule_files.read_schedules(layout.run_dir).config
    log = logging.setup("timer", 0, config)
    stopping = threading.Event()
    # early: the keeper may send SIGTERM as soon as the timer has its lock
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        wake_fd = schedule_files.register_timer(layout.run_dir)
    except OSError as error:
        log.error("the timer cannot start, or another is running", reason=error.strerror)
        return 1
    is_late = not schedule_files.may_run(layout.run_dir)
    if is_late:
        stopping.set()
    from mqd.native import core  # noqa: F401  # before confinement: in tests the import opens a file

    log.info("process confined", in_force=confinement.confine(config, layout))
    signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    timer = Timer(layout, lambda: _wake(wake_fd))
    while not stopping.is_set():
        if not timer.update():
            log.info("timer ended", reason="no schedule is left")
            return 0
        if select.select([wake_fd], [], [], timer.wait_s())[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_fd, 4096)
    timer.stop()
    # after a failed start, supervisord would start the timer again although the broker has stopped
    time.sleep(max(0.0, started_at + START_S - time.monotonic()))
    log.info("timer ended", reason="the broker is stopped" if is_late else "SIGTERM")
    return 0


if __name__ == "__main__":
    sys.exit(main())
