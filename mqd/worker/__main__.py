"""`python -m mqd.worker INDEX`: one worker of the broker whose keeper runs in MQD_DATA_DIR. Started
by supervisord.
"""

import gc

gc.disable()  # no garbage collection while modules load

import argparse
import asyncio
import errno
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mqd.base import logging
from mqd.base.paths import default_data_dir, keep_private, layout
from mqd.base.property_values import ConfigError
from mqd.native import NativeError
from mqd.security import confinement
from mqd.shm.attach import KeeperClient, KeeperError
from mqd.shm.keeper_messages import CANNOT_START
from mqd.shm.segments import SegmentError


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mqd.worker", description="One worker process of a broker; started by supervisord."
    )
    parser.add_argument("position", nargs="?", type=int, metavar="INDEX", help="which worker, counted from 0")
    parser.add_argument("--index", type=int, help="the same as INDEX")
    parser.add_argument("--data-dir", type=Path, help="the broker's data directory; default: MQD_DATA_DIR")
    arguments = parser.parse_args()
    if arguments.index is None:
        arguments.index = arguments.position
    if arguments.index is None:
        parser.error("missing INDEX: which worker, counted from 0")
    return arguments


def _is_permanent(error: Exception, config: Mapping[str, str]) -> bool:
    """Whether a restart would fail in the same way: a wrong setting, or io_uring required where it
    is forbidden.
    """
    is_refused = isinstance(error, NativeError) and error.code in (errno.EPERM, errno.ENOSYS)
    return isinstance(error, ConfigError) or (is_refused and config.get("io.backend") == "io_uring")


def main() -> int:
    arguments = _arguments()
    keep_private()
    log = logging.setup("worker", arguments.index)
    broker_layout = layout(arguments.data_dir or default_data_dir())
    try:
        client = KeeperClient.connect(broker_layout.run_dir, "worker", arguments.index)
    except (KeeperError, NativeError, SegmentError) as error:
        log.error("cannot attach", reason=str(error))
        return 1
    logging.setup("worker", arguments.index, client.config)
    logging.follow(lambda: client.control.log_level)
    client.confinement = confinement.confine(client.config, broker_layout, makes_ring=True)
    log.info("process confined", in_force=client.confinement)
    # imported after attaching, so that an error of the keeper is reported sooner
    from mqd.worker.worker import Worker

    # loaded modules are never freed: later collections skip them
    gc.freeze()
    gc.enable()

    async def serve() -> int:
        return await Worker(client, broker_layout.run_dir, broker_layout.logs_dir).run()

    try:
        return asyncio.run(serve())
    except Exception as error:
        # mqd up shows the cause and remedy of errors that the user can fix
        is_user_fixable = isinstance(error, (NativeError, ConfigError))
        log.exception(f"worker failed: {error}" if is_user_fixable else "worker failed")
        # the reactor's thread is still running, and uses memory that an orderly exit would unmap
        os._exit(CANNOT_START if _is_permanent(error, client.config) else 1)


if __name__ == "__main__":
    sys.exit(main())
