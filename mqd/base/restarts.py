"""The reasons for restarts of the broker's processes, as a file in the run directory: supervisord
in `mqd up`, the only process that sees exit statuses, writes it; the acceptor reads it for its
metrics.

    run/restarts.json          process -> reason -> count, since the broker was started

The file is informational, and is replaced by a rename. Under another supervisord it does not exist.
"""

import os
import signal
from pathlib import Path

import msgspec

FILE = "restarts.json"
STOPPED, KILLED, ABORTED, CRASHED, HUNG, FAILED = "stopped", "killed", "aborted", "crashed", "hung", "failed"
REASONS = {
    STOPPED: "SIGTERM",
    KILLED: "SIGKILL: by the kernel when memory ran out, or by hand",
    ABORTED: "a broken invariant",
    CRASHED: "another signal",
    HUNG: "its event loop hung",
    FAILED: "it could not continue; its log has the reason",
}
HUNG_STATUS = 70
_SIGNALS: dict[int, str] = {signal.SIGKILL: KILLED, signal.SIGTERM: STOPPED, signal.SIGABRT: ABORTED}

Restarts = dict[str, dict[str, int]]


def reason(wait_status: int) -> str:
    """Returns the reason for a restart, from the status that waitpid() returned."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code < 0:
        return _SIGNALS.get(-code, CRASHED)
    return {0: STOPPED, HUNG_STATUS: HUNG}.get(code, FAILED)


def write(run_dir: Path, restarts: Restarts) -> None:
    """Raises OSError."""
    new_file = run_dir / f"{FILE}.new"
    new_file.write_bytes(msgspec.json.encode(restarts))
    os.replace(new_file, run_dir / FILE)


def read(run_dir: Path) -> Restarts | None:
    """Returns None if the file does not exist, or cannot be read (another version of mqd wrote it)."""
    try:
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=Restarts)
    except (OSError, msgspec.MsgspecError):
        return None
