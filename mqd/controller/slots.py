"""The control segment's partition slots for the host core: reads those that a predecessor left, and
writes the core's assignments (invariants H1 to H8 of mqd/cluster/host/core.py).
"""

from mqd import native
from mqd.cluster.host.core import OWNER_NONE, AssignSlot, SlotSeen, Started
from mqd.cluster.host.images import LOG_DIR_NONE
from mqd.cluster.metadata.state import MetadataState


def read_slots(control: native.Control, state: MetadataState) -> Started:
    """The state that a starting controller finds. `state`: the committed metadata."""
    alive = {
        index: control.endpoint_generation(index)
        for index in range(control.worker_count)
        if control.endpoint_state(index) in (native.ProcessState.STARTING, native.ProcessState.RUNNING)
    }
    used, torn = control.slots_in_use()
    found = (
        SlotSeen(
            slot,
            view.topic_id,
            view.partition_index,
            view.leader_epoch,
            view.owner,
            _is_stale(control, view),
            view.log_dir,
        )
        for slot, view in used.items()
    )
    return Started(state, tuple(found), tuple(torn), alive)


def assign(control: native.Control, action: AssignSlot) -> None:
    """A partition without an owner is OFFLINE, and stays so until its new owner has opened it: a
    flush of the previous owner may have failed, and the flag makes the new owner's recovery rewrite
    what is perhaps not on the disk.
    """
    before = _view(control, action.slot)
    if action.moved and before is not None and _is_stale(control, before):
        return  # the owner's old generation shows that it died; a new assignment would hide that
    offline = action.owner == OWNER_NONE or (
        before is not None and before.owner == OWNER_NONE and before.state == native.SlotState.OFFLINE
    )
    log_dir = action.log_dir if action.log_dir != LOG_DIR_NONE else 0
    control.assign_slot(action.slot, action.topic_id, action.index, action.owner, log_dir, action.leader_epoch)
    if offline:
        control.set_slot_state(action.slot, native.SlotState.OFFLINE)


def _view(control: native.Control, slot: int) -> native.SlotView | None:
    """The slot's view. None: the slot is torn, because a predecessor died while writing its
    identity.
    """
    try:
        return control.slot_view(slot)
    except native.NativeError:
        return None


def _is_stale(control: native.Control, view: native.SlotView) -> bool:
    """Whether the slot's owner has died since the slot was assigned."""
    return view.owner != native.OWNER_NONE and view.owner_generation != control.endpoint_generation(view.owner)
