"""AdminClient: a subclass of confluent_kafka's. Administrative requests are rare; they use TCP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import confluent_kafka.admin

from mqd.client import config as configuration


class AdminClient(confluent_kafka.admin.AdminClient):
    """confluent_kafka.admin.AdminClient; keys of this package (transport, mqd.*) in `config` are
    accepted but have no effect.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        settings = configuration.read(config, more)
        logger = {} if settings.logger is None else {"logger": settings.logger}
        super().__init__(dict(settings.rdkafka), **logger)
