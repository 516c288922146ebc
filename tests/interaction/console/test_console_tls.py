"""The console's own TLS: on a public address, with a certificate of `mqd cert`, a login, and
cookies that browsers send only over TLS.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import ssl
from pathlib import Path
from urllib.parse import urlencode

import pytest

from mqd.cli import main as main_module
from mqd.cli import secure
from mqd.console.command import server_of
from mqd.console.options import Options, checked
from mqd.security.client import ClientSecurity
from tests.certificates import Authority
from tests.interaction.console.serving import served
from tests.interaction.security.secured import PASSWORDS, Secured

SASL = ClientSecurity({"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "SCRAM-SHA-256"})


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> secure.Files:
    """The files that `mqd up --secure` creates."""
    return secure.prepare(tmp_path_factory.mktemp("tls"), 1, ["localhost"])


@pytest.fixture(scope="module")
def certificate(places: secure.Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("console") / "console.pem"
    words = ["cert", "create", "console", "--host", "localhost", "--out", str(file)]
    assert main_module._run([*words, "--data-dir", str(places.directory.parent)]) == 0
    return file


class Client:
    def __init__(self, port: int, ca: Path | None = None) -> None:
        self.port, self.cookie = port, ""
        trust = ssl.create_default_context(cafile=ca)
        self._connection = http.client.HTTPSConnection("localhost", port, timeout=30, context=trust)

    def __call__(self, method: str, path: str, form: dict[str, str] | None = None, scheme: str = "https") -> tuple:
        headers = {"cookie": self.cookie}
        if form is not None:
            headers["content-type"] = "application/x-www-form-urlencoded"
            headers["origin"] = f"{scheme}://localhost:{self.port}"
        self._connection.request(method, path, urlencode(form) if form else None, headers)
        response = self._connection.getresponse()
        body = response.read().decode()
        if cookie := response.getheader("set-cookie"):
            self.cookie = cookie.split(";")[0]
        return response, body

    def close(self) -> None:
        self._connection.close()


def test_users_log_in_by_tls_from_anywhere(secured: Secured, places: secure.Files, certificate: Path) -> None:
    given = Options(
        secured.bootstrap, SASL, "0.0.0.0", 0, frozenset({"localhost"}), certificate=certificate, key=certificate
    )
    with served(checked(given)) as port, contextlib.closing(Client(port, places.ca)) as client:
        response, _ = client("GET", "/")
        assert response.status == 303 and response.getheader("location") == "/login"
        response, body = client("GET", "/login")
        cookie = response.getheader("set-cookie")
        assert cookie.startswith("__Host-mqd-console=") and "Secure" in cookie and "HttpOnly" in cookie
        (token,) = re.findall(r'name="token" value="(\w+)"', body)
        form = {"token": token, "to": "/", "user": "alice", "password": PASSWORDS["alice"]}
        assert client("POST", "/login", form, scheme="http")[0].status == 403, "a page without TLS sent it"
        response, _ = client("POST", "/login", form)
        assert response.status == 303 and "Secure" in response.getheader("set-cookie")
        assert "Healthy: 1 broker" in client("GET", "/")[1]

        plain = http.client.HTTPConnection("localhost", port, timeout=30)
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.request("GET", "/login")
            plain.getresponse()
        plain.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            Client(port)("GET", "/login")
        assert client("GET", "/")[0].status == 200, "and the page is served still"


@pytest.mark.parametrize(
    ("content", "password", "reason"),
    [("nonsense", None, "give a PEM file with the certificate"), (None, "secret", "has a password")],
)
def test_a_certificate_that_cannot_be_used_is_reported(
    certificate: Path, tmp_path: Path, content: str | None, password: str | None, reason: str
) -> None:
    file = tmp_path / "console.pem"
    file.write_text(content or certificate.read_text())
    key = file
    if password is not None:
        key = tmp_path / "console.key"
        key.write_bytes(Authority().issue("console", "localhost").key_pem(password))
    given = Options("127.0.0.1:1", ClientSecurity(), "127.0.0.1", 0, frozenset(), certificate=file, key=key)
    with pytest.raises(main_module.CliError, match=reason):
        server_of(checked(given))
