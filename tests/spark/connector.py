"""Spark's own connector for Kafka: its jars, through Maven (pom.xml), kept in .build."""

from __future__ import annotations

from pathlib import Path

from perf.peers import maven
from perf.peers.peer import Unavailable

POM = Path(__file__).with_name("pom.xml")


def jars() -> tuple[list[Path], str]:
    """The jars, or none and the reason."""
    try:
        found = sorted(maven.jars(POM).glob("*.jar"))
    except Unavailable as why:
        return [], f"Spark's connector for Kafka cannot be had: {why}"
    return found, ""
