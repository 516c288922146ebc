"""Makes `format("mqd")` known to PySpark by itself: Spark imports every top-level module named
`pyspark_*` and registers its DefaultSource.

Nothing native is imported here, nor anything that may fail to be: one such module that cannot be
imported makes Spark forget all of them (docs/spark.md, "Installing").
"""

from mqd.spark.source import MqdDataSource as DefaultSource

__all__ = ["DefaultSource"]
