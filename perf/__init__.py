"""Measures the performance of mqd: `make bench`. See README.md."""
