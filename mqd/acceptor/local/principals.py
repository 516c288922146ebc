"""The principal of a local client: the user of its process, according to the kernel.

The broker's own user is a super user (principal.BROKER): it could read every file of the broker and
attach to each of its processes anyway. Any other user id is looked up, and its login name mapped by
`local.principal.mapping.rules`; a client without a name, without a matching rule, or with the name
of a super user is refused and has to use TCP.

Without an authorizer, local clients have no principal.
"""

import os
import pwd
import time
from collections.abc import Callable, Mapping

from mqd.base.config import broker_value
from mqd.security.principal import BROKER, local_rules, map_name, super_users, user

CACHE_S = 60.0  # a lookup may need the network
CACHE_COUNT_MAX = 1024


class LocalPrincipals:
    def __init__(
        self,
        config: Mapping[str, str],
        own_uid: int = os.geteuid(),
        login_name_of: Callable[[int], str] = lambda uid: pwd.getpwuid(uid).pw_name,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_authorizer = bool(broker_value(config, "authorizer.class.name"))
        self._rules = local_rules(config)
        self._super_users = super_users(str(broker_value(config, "super.users") or ""))
        self._own_uid = own_uid
        self._login_name_of = login_name_of
        self._clock = clock
        self._cache: dict[int, tuple[float, str | None]] = {}

    def is_resolved(self, uid: int) -> bool:
        """Whether find() returns at once; otherwise it may wait for the network."""
        cached = self._cache.get(uid)
        return (
            not self._has_authorizer
            or uid == self._own_uid
            or (cached is not None and self._clock() - cached[0] < CACHE_S)
        )

    def find(self, uid: int) -> str | None:
        """Returns the principal of a user id, "" if none is needed, or None if the client is refused.
        Thread-safe.
        """
        if not self._has_authorizer:
            return ""
        if uid == self._own_uid:
            return BROKER
        now = self._clock()
        cached = self._cache.get(uid)
        if cached is None or now - cached[0] >= CACHE_S:
            if len(self._cache) >= CACHE_COUNT_MAX:
                self._cache.clear()
            cached = self._cache[uid] = now, self._look_up(uid)
        return cached[1]

    def _look_up(self, uid: int) -> str | None:
        try:
            name = map_name(self._rules, self._login_name_of(uid))
            principal = None if name is None else user(name)
            # a login name is not enough to be an administrator: that requires a password or certificate
            return None if principal in self._super_users else principal
        except (KeyError, OSError, ValueError):
            return None
