"""Pipelines on Spark: DataFrame -> DataFrame, and their runner (README.md)."""
