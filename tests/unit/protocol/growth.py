"""How the CPU time of a call grows with the size of its input. A client decides the size, and the
acceptor's event loop, the controller and a coordinator serve all clients from one thread: what grows
with the square of a request's size stops them for minutes.
"""

import gc
import time
from collections.abc import Callable


def assert_linear(run: Callable[[int], Callable[[], object]], count: int) -> None:
    """`run(n)` prepares an input of size n and returns the call to be measured. Four times the input may
    take ten times as long; with quadratic growth it takes sixteen times. `count`: large enough that
    growth outweighs the fixed costs of a call.
    """
    small, large = (min(_cpu_s(run(size)) for _ in range(3)) for size in (count, 4 * count))
    assert large < 10 * small, f"{count}: {small * 1e3:.1f} ms, {4 * count}: {large * 1e3:.1f} ms"


def _cpu_s(call: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()
    try:
        began = time.thread_time()
        call()
        return time.thread_time() - began
    finally:
        gc.enable()
