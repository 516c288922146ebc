"""The principal of a local client: the user of its process, according to the kernel.

The broker's own user is a super user (principal.BROKER): it could read every file and attach to
every process of the broker anyway. Any other user id is looked up, and its login name mapped by
`local.principal.mapping.rules`; a client without a name, without a matching rule, or with the name
of a super user is refused and uses TCP.

Without an authorizer, local clients have no principal.
"""

import os
import pwd
import time
from collections.abc import Callable, Mapping

from mqd.base.config import broker_value
from mqd.security.principal import BROKER, local_rules, mapped, super_users, user

CACHE_S = 60.0  # a lookup may need the network
CACHE_COUNT_MAX = 1024


class LocalPrincipals:
    def __init__(
        self,
        config: Mapping[str, str],
        own_uid: int = os.geteuid(),
        login: Callable[[int], str] = lambda uid: pwd.getpwuid(uid).pw_name,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_authorizer = bool(broker_value(config, "authorizer.class.name"))
        self._rules = local_rules(config)
        self._super_users = super_users(str(broker_value(config, "super.users") or ""))
        self._own_uid = own_uid
        self._login = login
        self._clock = clock
        self._known: dict[int, tuple[float, str | None]] = {}

    def is_known(self, uid: int) -> bool:
        """Whether find() returns at once; otherwise it may wait for the network."""
        known = self._known.get(uid)
        return (
            not self._has_authorizer
            or uid == self._own_uid
            or (known is not None and self._clock() - known[0] < CACHE_S)
        )

    def find(self, uid: int) -> str | None:
        """The principal of a user id; "": none is needed; None: the client is refused. Thread-safe."""
        if not self._has_authorizer:
            return ""
        if uid == self._own_uid:
            return BROKER
        now = self._clock()
        known = self._known.get(uid)
        if known is None or now - known[0] >= CACHE_S:
            if len(self._known) >= CACHE_COUNT_MAX:
                self._known.clear()
            known = self._known[uid] = now, self._look_up(uid)
        return known[1]

    def _look_up(self, uid: int) -> str | None:
        try:
            name = mapped(self._rules, self._login(uid))
            principal = None if name is None else user(name)
            # a login name is not enough to be an administrator: that takes a password or certificate
            return None if principal in self._super_users else principal
        except (KeyError, OSError, ValueError):
            return None
