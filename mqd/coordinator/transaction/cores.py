"""Creates the cores of the transaction coordinator (mqd/coordinator/actions.py: Cores). The prefix
of the transactional id selects the kind of core.
"""

from mqd.coordinator.transaction import joint_records
from mqd.coordinator.transaction.core import Transaction
from mqd.coordinator.transaction.joint import PREFIX, JointTransaction
from mqd.coordinator.transaction.records import decode_key
from mqd.coordinator.transaction.state import Settings


class Transactions:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def core_name_of(self, key: bytes) -> str | None:
        joint = joint_records.transactional_id_of(key)
        name = joint if joint is not None else decode_key(key)
        if name is not None and name.startswith(PREFIX) != (joint is not None):
            raise ValueError(f"a record of the wrong kind of transaction for {name}")
        return name

    def make(self, name: str) -> Transaction | JointTransaction:
        return JointTransaction(name, self._settings) if name.startswith(PREFIX) else Transaction(name, self._settings)
