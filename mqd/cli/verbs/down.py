"""`mqd down`: stops the broker that uses the given data directory, and no other.

A pid is never signalled directly: a pidfd is opened first, and then the pid is verified again (the
keeper still names it, or it still holds supervisord's lock). This ensures that the pidfd refers to
the right process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqd.base.paths import Layout, default_data_dir, layout
from mqd.cli.common import EXIT_FAILED, EXIT_UNREACHABLE, CliError, emit_json

if TYPE_CHECKING:
    from mqd.shm.tools import KeeperConnection


def _find_by_keeper(tool: KeeperConnection) -> tuple[int, int]:
    """(pid, pidfd) of supervisord, or of a keeper that runs without supervisord. Raises
    KeeperError, ProcessLookupError.
    """
    from mqd.shm.tools import supervisor_pid

    def target() -> int:
        status = tool.status()
        return supervisor_pid(status) or next(process.pid for process in status.processes if process.role == "keeper")

    pid = target()
    pidfd = os.pidfd_open(pid)
    if target() != pid:
        os.close(pidfd)
        raise ProcessLookupError(f"pid {pid} has ended")
    return pid, pidfd


def _find_by_lock(paths: Layout) -> tuple[int, int] | None:
    """(pid, pidfd) of supervisord from its own lock, for when the keeper is not running. None if no
    process holds the lock.
    """
    from mqd.shm.tools import lock_holder_pid

    pid = lock_holder_pid(paths.supervisor_lock)
    if not pid:
        return None
    pidfd = os.pidfd_open(pid)
    if lock_holder_pid(paths.supervisor_lock) != pid:
        os.close(pidfd)
        return None
    return pid, pidfd


def _find(paths: Layout) -> tuple[int, int] | None:
    from mqd.shm.attach import KeeperDenied, KeeperError
    from mqd.shm.tools import KeeperConnection

    try:
        with KeeperConnection(paths.data_dir) as tool:
            return _find_by_keeper(tool)
    except KeeperDenied as error:
        raise CliError(str(error), EXIT_FAILED) from error
    except (KeeperError, ProcessLookupError):
        pass
    try:
        return _find_by_lock(paths)
    except ProcessLookupError:
        return None


def _wait_until_free(paths: Layout, pidfd: int | None, timeout_s: float) -> bool:
    """Waits until supervisord has ended and no process holds the data directory."""
    from mqd.shm.locks import is_locked

    start = time.monotonic()
    has_shown_progress = False
    while (remaining_s := timeout_s - (time.monotonic() - start)) > 0:
        if pidfd is not None:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if poll.poll(min(remaining_s, 0.5) * 1000):
                pidfd = None
        elif not is_locked(paths.lock):
            if has_shown_progress:
                print(file=sys.stderr)
            return True
        else:
            time.sleep(0.02)
        if sys.stderr.isatty() and time.monotonic() - start > 0.5:
            print(
                f"\rstopping the broker in {paths.data_dir} ... {time.monotonic() - start:.0f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )
            has_shown_progress = True
    if has_shown_progress:
        print(file=sys.stderr)
    return False


@click.command(short_help="Stop a broker.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="The broker's data directory.  [env: MQD_DATA_DIR; default: ~/.local/share/mqd]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the broker to end.",
)
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), help="Form of the output.  [default: text]"
)
@click.pass_context
def command(ctx: click.Context, data_dir: Path | None, timeout_s: float, output_format: str | None) -> int:
    """Stop the broker of a data directory, cleanly, and wait until it has ended."""
    from mqd.shm.locks import is_locked

    paths = layout(data_dir or default_data_dir())
    supervisor = _find(paths)
    if supervisor is None:
        if not is_locked(paths.lock):
            raise CliError(f"no broker is running in {paths.data_dir}", EXIT_UNREACHABLE)
        pid, pidfd = None, None  # its processes are already exiting
    else:
        pid, pidfd = supervisor
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        except ProcessLookupError:
            pass
    try:
        if not _wait_until_free(paths, pidfd, timeout_s):
            running_processes = f"pid {pid}" if pid else "its processes"
            raise CliError(
                f"the broker in {paths.data_dir} ({running_processes}) has not ended within {timeout_s:g} s; see"
                f" {paths.logs_dir}, or wait longer with --timeout"
            )
    finally:
        if pidfd is not None:
            os.close(pidfd)
    if (output_format or (ctx.find_root().obj or {}).get("output_format")) == "json":
        emit_json({"data_dir": str(paths.data_dir), "stopped": True})
    else:
        click.echo(f"stopped the broker in {paths.data_dir}")
    return 0
