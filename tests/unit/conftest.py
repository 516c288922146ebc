"""The limits of Hypothesis for this folder."""

from tests import busy_machine

busy_machine.load_profile()
