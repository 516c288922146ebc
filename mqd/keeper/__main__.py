"""`python -m mqd.keeper`: environment variables configure it (see mqd.keeper.settings).

Exit status: 0 after a clean shutdown, 2 when the broker cannot start here (the reason is the last
line of its log), 1 for everything else.
"""

from __future__ import annotations

import os
import sys
import time

from mqd.base import logging, paths
from mqd.keeper import settings as keeper_settings


def _supervisor() -> tuple[int, bool]:
    """Returns the pid of the parent supervisord, or 0 if there is none to watch, and whether it
    runs only this broker. supervisord's configuration sets MQD_RUN_SUPERVISOR: "own" if it runs
    only this broker. MQD_RUN_SUPERVISOR_PID overrides the pid in tests.
    """
    pid_override = os.environ.get("MQD_RUN_SUPERVISOR_PID", "")
    if pid_override.isdigit():
        return int(pid_override), True
    kind = os.environ.get("MQD_RUN_SUPERVISOR", "")
    return os.getppid() if kind else 0, kind == "own"


def _avoid_oom_killer() -> None:
    """Makes the kernel kill other processes first when memory runs out: they can be restarted, the
    keeper cannot. Needs a privilege; without it this has no effect.
    """
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("-500")
    except OSError:
        pass


def _keep_directories_private(settings: keeper_settings.Settings) -> None:
    """Removes other users' access to the broker's directories: a directory that an earlier version
    or an administrator created may be open to them.
    """
    from mqd.keeper.sockets import traversal_bits

    log = logging.get("keeper")
    traversal_mode = traversal_bits(int(settings.config.get("local.socket.permissions", "0600"), 8))
    for directory in {str(settings.places.data_dir), *settings.log_dirs}:
        if os.path.isdir(directory) and paths.tighten(
            directory, traversal_mode if directory == str(settings.places.data_dir) else 0
        ):
            log.info("a directory was open to other users; its permissions were restricted", directory=directory)


def _wait_out_startsecs(started_s: float) -> None:
    """Delays the exit until startsecs have passed: supervisord treats an earlier exit as a failed
    start, and would start the keeper again after `mqd down`.
    """
    from mqd.keeper.supervisor_config import START_S

    time.sleep(max(0.0, started_s + START_S - time.monotonic()))


def main() -> int:
    started_s = time.monotonic()
    supervisor_pid, supervisor_is_own = _supervisor()
    log = logging.setup("keeper")
    from mqd.base import schedule_files
    from mqd.base.config import without_effect
    from mqd.keeper import loop, resources
    from mqd.keeper.identity import IdentityError
    from mqd.security import confinement
    from mqd.shm.segments import SegmentError

    try:
        settings = keeper_settings.load()
        log = logging.setup("keeper", 0, settings.config)
        paths.create(settings.places)
        _keep_directories_private(settings)
        keeper_resources = resources.make(settings)
        schedule_files.allow_timer(settings.places.run_dir)
    except (OSError, ValueError, IdentityError, SegmentError) as error:
        log.error(
            f"the broker cannot start: {error.strerror if isinstance(error, OSError) and error.strerror else error}"
        )
        return 2
    logging.follow(lambda: keeper_resources.control.log_level)
    _avoid_oom_killer()
    confined = confinement.confine(settings.config, None)
    host, port = keeper_resources.addresses[0]
    log.info(
        "keeper started",
        host=host,
        port=port,
        workers=settings.worker_count,
        data_dir=settings.places.data_dir,
        generation=keeper_resources.generation,
        confined=confined,
    )
    if ineffective := without_effect(settings.config):
        log.warning("properties without effect; docs/configuration.md has the reasons", names=",".join(ineffective))
    try:
        keeper = loop.Keeper(settings, keeper_resources, supervisor_pid, supervisor_is_own)
        keeper.confinement = confined
        return keeper.run()
    except Exception:
        log.exception("the keeper failed; the broker shuts down")
        return 1
    finally:
        resources.remove(settings, keeper_resources)
        log.info("keeper ended")
        if supervisor_pid and not supervisor_is_own:
            _wait_out_startsecs(started_s)


if __name__ == "__main__":
    sys.exit(main())
