"""Creates the cores of the transaction coordinator (it implements CoreFactory of
mqd/coordinator/actions.py). The prefix of the transactional id selects the kind of core.
"""

from mqd.coordinator.transaction import joint_records
from mqd.coordinator.transaction.core import Transaction
from mqd.coordinator.transaction.joint import JOINT_PREFIX, JointTransaction
from mqd.coordinator.transaction.records import decode_key
from mqd.coordinator.transaction.state import Settings


class TransactionCoreFactory:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def core_name_of(self, key: bytes) -> str | None:
        joint_id = joint_records.transactional_id_of(key)
        name = joint_id if joint_id is not None else decode_key(key)
        if name is not None and name.startswith(JOINT_PREFIX) != (joint_id is not None):
            raise ValueError(f"the type of the record's key does not match the transactional id {name}")
        return name

    def make(self, name: str) -> Transaction | JointTransaction:
        return (
            JointTransaction(name, self._settings)
            if name.startswith(JOINT_PREFIX)
            else Transaction(name, self._settings)
        )
