"""The log of a worker that cannot start: `mqd up` shows the last error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import mqd.worker.worker as worker
from mqd.keeper.supervise import last_error
from mqd.native import NativeError
from mqd.worker import __main__ as program


class Ended(BaseException):
    """Replaces os._exit."""


@pytest.mark.parametrize(
    "error, reported",
    [
        (
            NativeError(1, "io_uring is not available; set io.backend=auto"),
            "io_uring is not available; set io.backend=auto",
        ),
        (KeyError("x"), "worker failed"),
    ],
)
def test_the_native_sides_reason_is_in_the_last_error(
    error: Exception, reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Worker:
        def __init__(self, *_: object) -> None:
            raise error

    def end(status: int) -> None:
        raise Ended(status)

    client = SimpleNamespace(config={}, control=SimpleNamespace(log_level=20))
    monkeypatch.setattr(program, "KeeperClient", SimpleNamespace(connect=lambda *_: client))
    monkeypatch.setattr(program, "keep_private", lambda: None)
    # this process continues
    monkeypatch.setattr(program.confinement, "confine", lambda *_, **__: "")
    monkeypatch.setattr(worker, "Worker", Worker)
    monkeypatch.setattr(program.os, "_exit", end)
    monkeypatch.setattr("sys.argv", ["worker", "0", "--data-dir", str(tmp_path)])
    with pytest.raises(Ended):
        program.main()
    log = tmp_path / "worker.log"
    captured = capfd.readouterr()
    log.write_text(captured.out + captured.err)
    assert reported in last_error(log, 0)
