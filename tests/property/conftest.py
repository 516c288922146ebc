"""The limits of Hypothesis for this folder, and the C side of its wire oracles."""

from tests import busy_machine
from tests.property.wire_oracle import dump as dump  # one build for all modules

busy_machine.load_profile()
