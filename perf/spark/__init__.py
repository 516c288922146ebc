"""What Spark reads from mqd, and what the parts of it cost: `python -m perf.spark`."""
