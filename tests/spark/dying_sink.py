"""`format("mqd-dying")`: the sink, with faults of a driver at the worst moments. A directory
(option `script`) selects them: each file in it is one fault that happens once, `<batch>.<what>`.

    fail-before     commit() fails before it has committed, and abort() too: as if the driver had
                    died, except for its process
    fail-after      commit() fails when it has committed
    twice           commit() is called twice
    hang-before, hang-after     commit() writes `<batch>.reached` and waits to be killed
    task            a task's first attempt writes its rows and then fails
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from mqd.spark.sink import MqdStreamWriter, stream_writer
from mqd.spark.source import MqdDataSource


class Script:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def takes(self, batch: int, what: str) -> bool:
        """Whether the fault happens now: true for the first caller."""
        try:
            (self.folder / f"{batch}.{what}").unlink()
        except FileNotFoundError:
            return False
        return True

    def hang(self, batch: int) -> None:
        (self.folder / f"{batch}.reached").touch()
        signal.pause()


class DyingDataSource(MqdDataSource):
    @classmethod
    def name(cls) -> str:
        return "mqd-dying"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802  (Spark's name)
        options = dict(self.options)
        script = Script(options.pop("script"))
        return DyingWriter(stream_writer(options, schema, overwrite), script)


class DyingWriter(MqdStreamWriter):
    def __init__(self, own: MqdStreamWriter, script: Script) -> None:
        self.options, self.fallback_run_id, self.script = own.options, own.fallback_run_id, script

    def write(self, iterator: Any) -> Any:
        from pyspark import TaskContext

        written = super().write(iterator)
        if self.script.takes(int(TaskContext.get().getLocalProperty("streaming.sql.batchId")), "task"):
            raise RuntimeError("a task fails behind its rows")
        return written

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
        if self.script.takes(batchId, "fail-before"):
            raise RuntimeError("the driver fails before the commit")
        if self.script.takes(batchId, "hang-before"):
            self.script.hang(batchId)
        super().commit(messages, batchId)
        if self.script.takes(batchId, "fail-after"):
            raise RuntimeError("the driver fails behind the commit")
        if self.script.takes(batchId, "hang-after"):
            self.script.hang(batchId)
        if self.script.takes(batchId, "twice"):
            super().commit(messages, batchId)

    def abort(self, messages: Any, batchId: int) -> None:  # noqa: N803
        """Does nothing: a dead process does not abort."""
