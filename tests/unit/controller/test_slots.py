"""Partition slots in a real control segment: written by the host core, read by the next controller."""

import mmap

import pytest

from mqd import native
from mqd.cluster.host.core import OWNER_NONE, AssignSlot, SlotSeen
from mqd.cluster.host.images import LOG_DIR_NONE
from mqd.cluster.metadata.state import MetadataState
from mqd.controller import slots

TOPIC = b"t" * 16
SLOT = 5


@pytest.fixture
def control() -> native.Control:
    control = native.Control.format(mmap.mmap(-1, native.control_size_bytes()), 2, b"b" * 16, 7, 1000)
    for worker in range(2):
        control.set_endpoint_state(worker, native.ProcessState.RUNNING, 4711)
    return control


def assign(
    control: native.Control, owner: int = 1, log_dir: int = 0, leader_epoch: int = 3, moved: bool = False
) -> native.SlotView:
    slots.assign(control, AssignSlot(SLOT, TOPIC, 2, owner, log_dir, leader_epoch, moved))
    return control.slot_view(SLOT)


def seen(control: native.Control) -> SlotSeen:
    (found,) = slots.read_slots(control, MetadataState()).slots
    return found


def test_assigned_slots_are_read_back(control: native.Control) -> None:
    assign(control, log_dir=4)
    assert seen(control) == SlotSeen(SLOT, TOPIC, 2, 3, 1, False, 4)
    assert slots.read_slots(control, MetadataState()).live_workers == {
        0: control.endpoint_generation(0),
        1: control.endpoint_generation(1),
    }
    control.clear_slot(SLOT)
    assert slots.read_slots(control, MetadataState()).slots == ()


def test_a_move_is_read_back_and_does_not_change_a_dead_owners_slot(control: native.Control) -> None:
    assign(control)
    assert assign(control, log_dir=1, moved=True).log_dir == 1 and not seen(control).stale
    control.set_endpoint_state(1, native.ProcessState.DEAD, 4711)
    assert assign(control, log_dir=0, moved=True).log_dir == 1 and seen(control).stale
    view = assign(control, log_dir=0, leader_epoch=4)
    assert (view.log_dir, view.leader_epoch) == (0, 4) and not seen(control).stale


def test_a_slot_without_owner_is_offline_until_the_new_one_has_opened_it(control: native.Control) -> None:
    assert assign(control).state == native.SlotState.OPENING
    view = assign(control, owner=OWNER_NONE, log_dir=LOG_DIR_NONE)
    assert (view.owner, view.log_dir, view.state) == (OWNER_NONE, 0, native.SlotState.OFFLINE)
    view = assign(control, owner=1, log_dir=1)
    assert (view.owner, view.log_dir, view.state) == (1, 1, native.SlotState.OFFLINE)
