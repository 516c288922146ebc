"""The process's limit on open files."""

import resource


def raise_limit() -> int:
    """Raises the limit as far as permitted, because each connection and each open segment needs a
    descriptor. Returns the new limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 20
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return hard
