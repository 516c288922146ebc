"""The command line's messages when a log directory is missing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.broker import Broker
from tests.preloaded import PRELOADED


def mqd(broker: Broker, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MQD_BOOTSTRAP": broker.bootstrap}
    return PRELOADED.run(*arguments, given=stdin, environment=environment)


def test_an_empty_mount_point_takes_only_its_partitions_offline_and_readers_get_an_error(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    with Broker(tmp_path / "data", config={"log.dirs": ",".join(map(str, directories))}) as broker:
        assert mqd(broker, "topic", "create", "t", "-p", "2").returncode == 0
        for index in (0, 1):
            assert mqd(broker, "produce", "t", "-p", str(index), stdin="kept\n").returncode == 0
        broker.stop()
        (gone,) = [index for index in (0, 1) if (directories[1] / f"t-{index}").is_dir()]
        directories[1].rename(tmp_path / "unmounted")
        directories[1].mkdir()
        broker.start()
        assert mqd(broker, "consume", "t", "-e", "-p", str(1 - gone)).stdout == "kept\n"
        done = mqd(broker, "consume", "t", "-e")
        assert done.returncode == 1 and f"no broker serves partition {gone}: broker " in done.stderr
        assert not list(directories[1].glob("t-*")), "a new partition was begun in an empty mount point"
        assert "is not the one that was here" in (tmp_path / "data" / "logs" / "mqd-controller.log").read_text()
