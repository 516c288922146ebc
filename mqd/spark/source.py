"""`format("mqd")`: the objects that Spark calls, on the driver and, for read(), in executors.

    MqdDataSource.reader          MqdReader          a batch: partitions() once, read() for each
    MqdDataSource.streamReader    MqdStreamReader    a micro-batch query: latestOffset, partitions, commit;
                                                     read() for each
    MqdDataSource.writer, .streamWriter              mqd.spark.sink

1. Objects of this module are pickled to other processes: they hold options and plain values;
   connections are opened by the process that uses them.
2. Importing this module imports neither native code nor PyArrow: registering the format costs no
   more than PySpark itself.
3. read() of one partition always returns the same records while the log holds them, so a replayed
   micro-batch is the same batch.

The stream's own rules are in mqd/spark/progress.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from mqd.spark import schema as columns
from mqd.spark.options import SparkOptions, source_options
from mqd.spark.planning import Range

FORMAT = "mqd"


class MqdDataSource(DataSource):
    """See the module's docstring. Registered by the top-level module pyspark_mqd, or by
    spark.dataSource.register(MqdDataSource).
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return columns.ddl(SparkOptions(self.options).boolean("includeHeaders", False))

    def reader(self, schema: Any) -> DataSourceReader:
        return MqdReader(dict(self.options), columns.requested_columns(schema))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802  (Spark's name)
        return MqdStreamReader(dict(self.options), columns.requested_columns(schema))

    def writer(self, schema: Any, overwrite: bool) -> Any:
        from mqd.spark import sink

        return sink.batch_writer(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
        from mqd.spark import sink

        return sink.stream_writer(dict(self.options), schema, overwrite)


class RangePartition(InputPartition):
    """One task: `value` is a planning.Range, or a file of an archive
    (pipelines.parquet.ArchivedTask).
    """


def _read(options: Any, names: tuple[str, ...], partition: InputPartition) -> Iterator[Any]:
    if partition.value is None:  # Spark's own placeholder for an empty list of partitions
        return iter(())
    if not isinstance(partition.value, Range):
        from mqd.spark.pipelines import parquet

        return parquet.read(partition.value, names)
    from mqd.spark import reading

    return reading.read_range(options, names, partition.value)


class MqdReader(DataSourceReader):
    """A batch read: its offsets are determined once, when Spark plans it."""

    def __init__(self, given: Mapping[str, str], names: tuple[str, ...]) -> None:
        self.options = source_options(given, streaming=False)
        self.names = names

    def partitions(self) -> list[InputPartition]:
        from mqd.spark import driver

        return [RangePartition(range_) for range_ in driver.plan_batch(self.options)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(self.options, self.names, partition)


class MqdStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. Offsets are dictionaries, the JSON of mqd.spark.offsets."""

    def __init__(self, given: Mapping[str, str], names: tuple[str, ...]) -> None:
        self.options = source_options(given, streaming=True)
        self.names = names
        self._progress: Any = None

    def _get_progress(self) -> Any:
        """Created on first use, because this object is pickled before that."""
        if self._progress is None:
            from mqd.spark import driver, progress

            self._progress = progress.Progress(self.options, driver.Driver(self.options))
        return self._progress

    def initialOffset(self) -> dict:  # noqa: N802
        return self._get_progress().initial()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """In Python, Spark has no limit with both a minimum and a maximum: any type other than
        ReadAllAvailable will do, because latestOffset applies the options.
        """
        if self.options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self.options.max_offsets_per_trigger)
        return (
            ReadMinRows(self.options.min_offsets_per_trigger)
            if self.options.min_offsets_per_trigger is not None
            else ReadAllAvailable()
        )

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._get_progress().prepare_available_now()

    def latestOffset(self, start: dict, limit: ReadLimit) -> dict:  # noqa: N802
        return self._get_progress().latest(start, unlimited=isinstance(limit, ReadAllAvailable))

    def reportLatestOffset(self) -> dict | None:  # noqa: N802
        return self._get_progress().report()

    def partitions(self, start: dict, end: dict) -> Sequence[InputPartition]:
        return [RangePartition(range_) for range_ in self._get_progress().plan(start, end)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(self.options, self.names, partition)

    def commit(self, end: dict) -> None:
        self._get_progress().commit_offsets(end)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.close()
