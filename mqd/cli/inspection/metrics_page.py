"""Reads a broker's metrics page, for the commands about a broker on this host."""

from __future__ import annotations

import http.client
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 30.0


class Sample(NamedTuple):
    """A line of a metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


def text(url: str, data_dir: Path) -> str:
    """Returns the page. Uses the token and the CA that `mqd up --secure` created in the data
    directory. Raises OSError, ValueError.
    """
    request = urllib.request.Request(url)
    token, ca = data_dir / "secure" / "metrics.token", data_dir / "secure" / "ca.pem"
    if token.exists():
        request.add_header("Authorization", f"Bearer {token.read_text().strip()}")
    context = ssl.create_default_context(cafile=str(ca)) if url.startswith("https") and ca.exists() else None
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as response:
            return response.read().decode()
    except http.client.HTTPException as error:  # for example, the page is cut off
        raise OSError(f"the response is not valid: {error!r}") from error


def read(url: str, data_dir: Path) -> list[Sample]:
    """The samples of text(). Raises OSError, ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    return [
        Sample(sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text(url, data_dir))
        for sample in family.samples
    ]
