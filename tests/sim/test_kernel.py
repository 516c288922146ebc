"""Tests of the simulator itself."""

from tests.sim.kernel import Kernel, Process


def test_a_resumed_process_first_reads_messages_from_its_pause() -> None:
    """Even before messages that arrive at that very moment: a worker that continued got a change
    before the image that had been sent first (seed 765695).
    """
    kernel, process, received = Kernel(1), Process("worker"), []
    process.stopped = True
    kernel.after(10, process, received.append, "first")
    kernel.after(10, process, received.append, "second")
    kernel.run(until=15)
    kernel.after(5, None, kernel.go_on, process)
    kernel.after(5, process, received.append, "third")
    kernel.run()
    assert received == ["first", "second", "third"]
