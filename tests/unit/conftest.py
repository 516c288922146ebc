"""The limits of Hypothesis for this folder."""

import pytest

from mqd.cluster.metadata.features import FEATURES, MQD_VERSION, SHARE_GROUPS_LEVEL
from tests import busy_machine

busy_machine.load_profile()


@pytest.fixture
def share_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host supports the levels that share groups need."""
    monkeypatch.setitem(FEATURES, MQD_VERSION, FEATURES[MQD_VERSION]._replace(last=SHARE_GROUPS_LEVEL))
