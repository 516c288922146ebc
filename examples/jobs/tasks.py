"""Jobs for the demo: quick jobs, slow jobs, jobs that fail at first, and jobs that always fail."""

import os
import time

from jobs import Queue

queue = Queue("jobs", os.environ.get("MQD_BOOTSTRAP", "127.0.0.1:9092"))


@queue.task
def square(number):
    time.sleep(0.005)
    return number * number


@queue.task
def slow(number, seconds):
    time.sleep(seconds)
    return -number


@queue.task
def flaky(number):
    if queue.attempt < 3:
        raise ConnectionError(f"attempt {queue.attempt} failed")
    return number


@queue.task
def poison(number):
    raise ValueError(f"{number} cannot be done")
