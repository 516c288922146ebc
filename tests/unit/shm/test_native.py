"""The core's Python bindings: values survive a round trip, and buffers with pointers in C cannot be
freed.
"""

import errno
import mmap
import os
import threading

import pytest

from mqd import native
from mqd.native import control as control_module

WORKERS = 2
ENDPOINTS = WORKERS + 2


@pytest.fixture
def control():
    return native.Control.format(mmap.mmap(-1, native.control_size_bytes()), WORKERS, b"b" * 16, 7, 1000)


@pytest.fixture
def ends(control):
    links = mmap.mmap(-1, native.links_size_bytes(ENDPOINTS))
    native.links_format(links, ENDPOINTS)
    eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(ENDPOINTS)]
    yield [native.Endpoint(control, links, index, ENDPOINTS, eventfds) for index in range(ENDPOINTS)], eventfds
    for fd in eventfds:
        os.close(fd)


def test_c_constants_become_enumerations():
    assert native.DescriptorKind.REQUEST.name == "REQUEST"
    assert [state.name for state in native.ProcessState] == ["ABSENT", "STARTING", "RUNNING", "DEAD"]
    assert native.Counter.GAUGE_ARENA_EXTENTS_USED > native.Counter.COUNT_LOOPS
    assert len(native.Counter) == native.lib.MQD_COUNTER_COUNT
    assert len(native.Histogram) == native.lib.MQD_HISTOGRAM_COUNT


def test_crc32c_of_the_check_string():
    assert native.crc32c(b"123456789") == 0xE3069283  # RFC 3720, B.4's polynomial; the catalogue's check value
    assert native.crc32c(b"456789", native.crc32c(b"123")) == 0xE3069283
    assert native.crc32c(b"") == 0


@pytest.mark.parametrize(
    "meanwhile", [lambda control: control.slot_view(6).partition_index, lambda control: sum(control.partition_counts())]
)
def test_a_slot_is_read_while_another_thread_reads_another(control, monkeypatch, meanwhile):
    """A scrape of the metrics reads all partitions while the acceptor's loop reads one."""
    control.assign_slot(5, b"a" * 16, 0, 1, 0, 9)
    control.assign_slot(6, b"b" * 16, 2, 1, 0, 11)
    control.slot_view(5)  # memory is allocated
    read, others = control_module._read_slot, []

    def interrupted(memory, slot, view):
        result = read(memory, slot, view)
        if slot == 5 and not others:
            others.append(threading.current_thread())
            other = threading.Thread(target=lambda: others.append(meanwhile(control)))
            other.start()
            other.join()
        return result

    monkeypatch.setattr(control_module, "_read_slot", interrupted)
    view = control.slot_view(5)
    assert others[1] == 2
    assert (view.topic_id, view.partition_index, view.leader_epoch) == (b"a" * 16, 0, 9)


def test_a_control_segment_is_formatted_and_attached(control):
    assert (control.worker_count, control.generation) == (WORKERS, 7)
    other = native.Control.attach(control.buffer)
    other.metadata_version = 12
    control.log_level = 7
    assert (control.metadata_version, other.log_level) == (12, 7)


def test_zeroes_are_not_a_control_segment():
    with pytest.raises(native.NativeError) as error:
        native.Control.attach(mmap.mmap(-1, native.control_size_bytes()))
    assert error.value.code == native.E_LAYOUT


def test_a_control_segment_that_is_too_small_is_refused():
    with pytest.raises(native.NativeError):
        native.Control.format(mmap.mmap(-1, 4096), WORKERS, b"b" * 16, 7, 1000)


def test_death_bumps_the_generation(control):
    control.set_endpoint_state(1, native.ProcessState.RUNNING, 4711)
    before = control.endpoint_generation(1)
    control.set_endpoint_state(1, native.ProcessState.DEAD, 4711)
    assert control.endpoint_state(1) == native.ProcessState.DEAD
    assert control.endpoint_generation(1) == before + 1


def test_a_slot_is_assigned_seen_and_cleared(control):
    control.assign_slot(5, b"t" * 16, 3, 1, 2, 9)
    view = control.slot_view(5)
    assert (view.topic_id, view.partition_index, view.owner, view.log_dir, view.leader_epoch) == (b"t" * 16, 3, 1, 2, 9)
    assert control.partition_counts() == [0, 1]
    control.clear_slot(5)
    assert control.slot_view(5).state == native.SlotState.FREE
    assert control.partition_counts() == [0, 0]


def test_a_start_sees_the_slots_in_use_and_the_torn_ones(control, monkeypatch):
    last = native.PARTITION_SLOT_COUNT - 1
    for slot in (0, 7, 9, last):
        control.assign_slot(slot, b"t" * 16, 3, 1, 2, 9)
    control.clear_slot(9)
    read = control_module._read_slot
    monkeypatch.setattr(
        control_module, "_read_slot", lambda memory, slot, view: -1 if slot == 7 else read(memory, slot, view)
    )
    used, torn = control.slots_in_use()
    assert (list(used), torn) == ([0, last], [7])
    assert used[last] == control.slot_view(last)


@pytest.mark.parametrize("slot", [-1, native.PARTITION_SLOT_COUNT])
def test_unknown_slots_are_refused(control, slot):
    with pytest.raises((native.NativeError, OverflowError)):
        control.slot_view(slot)
    with pytest.raises(native.NativeError):
        control.clear_slot(slot)


def test_ids_of_the_wrong_size_never_reach_c(control):
    with pytest.raises(native.NativeError, match="16 bytes"):
        control.assign_slot(0, b"short", 0, 0, 0, 0)
    with pytest.raises(native.NativeError, match="16 bytes"):
        native.Control.format(mmap.mmap(-1, native.control_size_bytes()), 1, b"short", 1, 1)


def test_a_new_worker_has_no_statistics(control):
    counters, histograms = control.stats(0)
    assert counters.shape == (len(native.Counter),) and not counters.any()
    assert histograms.shape == (len(native.Histogram), native.HISTOGRAM_BUCKET_COUNT) and not histograms.any()


def test_a_descriptor_is_passed_unchanged(control, ends):
    (sender, _, _, receiver), _ = ends
    sent = native.Descriptor(
        kind=native.DescriptorKind.REQUEST,
        flags=65535,
        slot=2**32 - 1,
        token=2**64 - 1,
        offset=2**63,
        size_bytes=17,
        error=-1,
        a=-5,
        b=2**63 - 1,
        c=-(2**63),
    )
    assert sender.send(3, sent)
    assert receiver.drain() == []  # not before it is flushed
    sender.flush()
    [(origin, got)] = receiver.drain()
    assert origin == 0
    sent.generation = control.endpoint_generation(0)
    assert got == sent


def test_a_full_ring_refuses_and_accepts_more_after_a_drain(ends):
    (sender, _, receiver, _), _ = ends
    count = 0
    while sender.send(2, native.Descriptor(kind=1, token=count)):
        count += 1
    assert 0 < count <= native.LINK_DESCRIPTOR_COUNT
    assert sender.free_count(2) == 0
    sender.flush()
    tokens = []
    while batch := receiver.drain():
        tokens += [descriptor.token for _, descriptor in batch]
    assert tokens == list(range(count))
    assert sender.send(2, native.Descriptor(kind=1))


def test_a_sleeper_is_woken_once_and_a_late_arrival_forbids_sleep(ends):
    (sender, _, receiver, _), eventfds = ends
    assert os.eventfd_read(eventfds[2]) == ENDPOINTS - 1  # a process that opens the segment wakes all others
    assert receiver.prepare_sleep()
    sender.send(2, native.Descriptor(kind=1))
    sender.flush()
    assert os.eventfd_read(eventfds[2]) == 1
    receiver.end_sleep()
    assert not receiver.prepare_sleep()  # the message is still there
    receiver.end_sleep()
    assert len(receiver.drain()) == 1
    sender.send(2, native.Descriptor(kind=1))
    sender.flush()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(eventfds[2])  # no endpoint slept, none was woken


def test_an_endpoint_needs_one_eventfd_each(control):
    links = mmap.mmap(-1, native.links_size_bytes(ENDPOINTS))
    native.links_format(links, ENDPOINTS)
    with pytest.raises(native.NativeError, match="eventfds"):
        native.Endpoint(control, links, 0, ENDPOINTS, [0])


def test_an_arena_allocates_and_frees():
    memory = mmap.mmap(-1, 1 << 20)
    arena = native.Arena(memory, 65536)
    offset = arena.allocate(100_000)
    assert offset is not None and arena.extents_used == 2
    arena.view[offset : offset + 3] = b"abc"
    assert memory[offset : offset + 3] == b"abc"
    arena.hold(offset)
    assert not arena.release(offset)
    assert arena.release(offset)
    assert (arena.extents_used, arena.extents_total) == (0, 16)


def test_a_full_arena_is_none_not_an_error():
    arena = native.Arena(mmap.mmap(-1, 1 << 20), 65536)
    while arena.allocate(65536) is not None:
        pass
    assert arena.extents_used == arena.extents_total


def test_memory_that_c_points_into_cannot_be_unmapped(control):
    with pytest.raises(BufferError):
        control.buffer.close()


def test_read_only_memory_cannot_become_an_arena(tmp_path):
    path = tmp_path / "memory"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file, pytest.raises((BufferError, TypeError, ValueError)):
        native.Arena(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), 65536)


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "checkpoint"
    native.file_replace(path, b"one")
    native.file_replace(path, b"")
    assert path.read_bytes() == b""
    native.file_replace(path, bytearray(b"three"))
    assert path.read_bytes() == b"three"
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_appending_truncates_bytes_after_the_end(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    fd = native.file_open_append(path, 4)
    native.file_append(fd, b"ab", 4)
    native.file_flush(fd)
    native.file_close(fd)
    assert path.read_bytes() == b"0123ab"


def test_an_error_names_the_file_and_keeps_its_errno(tmp_path):
    with pytest.raises(native.NativeError) as error:
        native.file_replace(tmp_path / "missing" / "file", b"x")
    assert error.value.errno == errno.ENOENT
    assert "missing" in str(error.value)


def test_bytes_that_are_not_a_batch_are_refused_with_a_reason():
    error, reason, _ = native.batch_validate(b"\0" * 61)
    assert error != 0 and reason
    with pytest.raises(native.NativeError):
        native.batch_decode(b"\0" * 60)
