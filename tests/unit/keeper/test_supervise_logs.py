"""supervisord's logs on a full disk: lines are lost, and nothing else happens."""

import errno
import sys
from pathlib import Path

import pytest
from supervisor import loggers

from mqd.keeper.supervise import survive_full_disks

FULL = OSError(errno.ENOSPC, "No space left on device")


class FullStream:
    """A file, or standard error, whose disk is full."""

    def write(self, _data: object) -> int:
        raise FULL

    def flush(self) -> None:
        raise FULL

    def tell(self) -> int:
        raise FULL

    def close(self) -> None:
        """Nothing to do."""


@pytest.fixture
def logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> loggers.Logger:
    for name in ("handleError",):
        monkeypatch.setattr(loggers.Handler, name, getattr(loggers.Handler, name))
    monkeypatch.setattr(loggers.RotatingFileHandler, "doRollover", loggers.RotatingFileHandler.doRollover)
    logger = loggers.Logger()
    loggers.handle_file(
        logger, str(tmp_path / "mqd-worker-0.log"), "%(message)s", rotating=True, maxbytes=200, backups=1
    )
    monkeypatch.setattr(sys, "stderr", FullStream())
    return logger


def test_only_lines_that_cannot_be_written_are_lost(
    logger: loggers.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (handler,) = logger.handlers
    stream = handler.stream
    handler.stream = FullStream()
    with pytest.raises(OSError):
        logger.info("as supervisord has it")
    survive_full_disks()
    logger.info("lost")
    handler.stream = stream if not stream.closed else open(handler.baseFilename, "ab")
    logger.info("there is space again")
    stream = handler.stream

    def no_room(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(handler, "removeAndRename", no_room)
    for number in range(30):
        logger.info(f"line {number:03} of those that make it roll")
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "there is space again" in text and "line 000" in text and "line 029" in text and "lost" not in text
