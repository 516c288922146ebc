"""Hypothesis without time limits: how fast an example is generated or run on a busy machine says
nothing about the code. pytest's own time limit stays.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def load_profile() -> None:
    settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy machine")
