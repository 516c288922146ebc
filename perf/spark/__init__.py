"""The cost of reading from and writing to mqd with Spark: `python -m perf.spark`."""
