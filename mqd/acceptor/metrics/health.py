"""The results of /health/live and /health/ready: whether the acceptor's loop runs, and whether this
broker can serve clients.

Both are decided in the acceptor's loop, so neither is answered while the loop hangs. Nothing is
computed until a probe arrives.
"""

from mqd import native
from mqd.acceptor.broker import Broker

LIVE, READY = "/health/live", "/health/ready"


def faults(broker: Broker, control: native.Control, worker_count: int) -> list[str]:
    """Why clients cannot be served, one line each; empty when they can. Called in the loop's
    thread.
    """
    reasons = [
        f"worker {worker} is not running; supervisord restarts it"
        for worker in range(worker_count)
        if control.endpoint_state(worker) != native.ProcessState.RUNNING
    ]
    metadata = broker.metadata
    own = metadata.brokers.get(broker.node_id)
    if metadata.version < 0:
        reasons.append("the cluster's metadata has not arrived; mqd cluster status shows the controllers")
    elif own is None:
        reasons.append(f"broker {broker.node_id} is not registered; mqd cluster status shows the controllers")
    elif own.fenced:
        reasons.append(f"broker {broker.node_id} is fenced: the active controller receives no heartbeats from it")
    elif not broker.may_lead():  # the broker is cut off and cannot learn that it was fenced
        reasons.append(f"broker {broker.node_id} has lost its lease: it cannot reach the active controller")
    return reasons
