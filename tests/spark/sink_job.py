"""A streaming job in a process of its own, to be killed: `python sink_job.py BOOTSTRAP FROM TO CHECKPOINT SCRIPT`. From topic to topic, exactly once, for ever; batches of a few records."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from tests.spark.dying_sink import DyingDataSource


def main(bootstrap: str, source: str, target: str, checkpoint: str, script: str) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.extraJavaOptions", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
        .getOrCreate()
    )
    spark.dataSource.register(DyingDataSource)
    rows = spark.readStream.format("mqd").option("kafka.bootstrap.servers", bootstrap).option("subscribe", source).option("startingOffsets", "earliest")
    rows = rows.option("maxOffsetsPerTrigger", "500").load().selectExpr("key", "value")
    sink = rows.writeStream.format("mqd-dying").outputMode("append").option("kafka.bootstrap.servers", bootstrap).option("topic", target)
    sink.option("checkpointLocation", checkpoint).option("script", script).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
