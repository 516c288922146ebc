"""Commands in a fork of a process that has imported everything behave as executed ones."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from mqd import __version__
from tests.preloaded import PRELOADED


def test_output_exit_status_and_errors() -> None:
    good = PRELOADED.run("--version")
    assert (good.returncode, good.stdout, good.stderr) == (0, f"mqd {__version__}\n", "")
    bad = PRELOADED.run("upp")
    assert (bad.returncode, bad.stdout) == (2, "") and "did you mean up?" in bad.stderr


def test_it_is_our_child_in_its_own_session_with_its_arguments(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as output, open(tmp_path / "stderr", "w") as errors:
        environment = {**os.environ, "MQD_DATA_DIR": "data"}
        arguments = ["up", "--port", "0", "--workers", "1"]
        found = PRELOADED.start(arguments, output, errors, environment=environment, cwd=tmp_path)
    with open(reading) as message:
        try:
            assert select.select([message], [], [], 30)[0], (tmp_path / "stderr").read_text()
            assert message.readline().startswith("mqd ready") and (tmp_path / "data").is_dir()
            fields = Path(f"/proc/{found.pid}/stat").read_text().rpartition(")")[2].split()
            assert int(fields[1]) == os.getpid() and int(fields[3]) == found.pid
            with pytest.raises(subprocess.TimeoutExpired):
                found.wait(0.01)
            os.kill(found.pid, signal.SIGINT)  # as Ctrl-C does
            assert found.wait(20) == found.poll() == 0
        finally:
            found.send_signal(signal.SIGKILL)
