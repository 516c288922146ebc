"""The control segment's partition slots for the host core: reads those that a predecessor left, and
writes the core's assignments (invariants H1 to H8 of mqd/cluster/host/core.py).
"""

from mqd import native
from mqd.cluster.host.core import OWNER_NONE, AssignSlot, SlotSeen, Started
from mqd.cluster.host.images import LOG_DIR_NONE
from mqd.cluster.metadata.state import MetadataState


def read_slots(control: native.Control, state: MetadataState) -> Started:
    """The event by which a starting controller tells its host core what is in the slots. `state`:
    the committed metadata.
    """
    alive = {
        index: control.endpoint_generation(index)
        for index in range(control.worker_count)
        if control.endpoint_state(index) in (native.ProcessState.STARTING, native.ProcessState.RUNNING)
    }
    used, torn = control.slots_in_use()
    seen_slots = (
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
    return Started(state, tuple(seen_slots), tuple(torn), alive)


def assign(control: native.Control, action: AssignSlot) -> None:
    """Writes an assignment to its slot. A partition without an owner is OFFLINE, and stays so until
    its new owner has opened it: a flush of the previous owner may have failed, and the flag makes
    the new owner's recovery rewrite what possibly never reached the disk.
    """
    previous = _view(control, action.slot)
    if action.moved and previous is not None and _is_stale(control, previous):
        return  # the owner's old generation shows that it has died; a new assignment would hide this
    is_offline = action.owner == OWNER_NONE or (
        previous is not None and previous.owner == OWNER_NONE and previous.state == native.SlotState.OFFLINE
    )
    log_dir = action.log_dir if action.log_dir != LOG_DIR_NONE else 0
    control.assign_slot(action.slot, action.topic_id, action.index, action.owner, log_dir, action.leader_epoch)
    if is_offline:
        control.set_slot_state(action.slot, native.SlotState.OFFLINE)


def _view(control: native.Control, slot: int) -> native.SlotView | None:
    """The slot's view; None if the slot is torn, because a predecessor died while it wrote the
    partition's identity.
    """
    try:
        return control.slot_view(slot)
    except native.NativeError:
        return None


def _is_stale(control: native.Control, view: native.SlotView) -> bool:
    """Whether the slot's owner has died since the slot was assigned."""
    return view.owner != native.OWNER_NONE and view.owner_generation != control.endpoint_generation(view.owner)
