"""Pipelines on Spark: DataFrame -> DataFrame, and what runs them (README.md)."""
