"""`mqd console`: serves the web pages of a cluster, in a process of its own."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqd.cli import client_security
from mqd.cli.common import EXIT_USAGE, CliError, Settings, options
from mqd.console.options import LISTEN, Options, checked, parse_listen

if TYPE_CHECKING:
    import uvicorn

CONNECTIONS_MAX = 500
SHUTDOWN_S = 2
KEEP_ALIVE_S = 75  # longer than the refresh interval of pages, so that they need no new connection


@click.command(short_help="Serve a web console for the cluster: topics, messages, groups.")
@options
@click.option("--listen", default=LISTEN, show_default=True, metavar="ADDRESS:PORT", help="Where browsers connect.")
@click.option("--read-only", is_flag=True, help="Show everything, change nothing.")
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A host name that browsers use for the page; may be repeated.",
)
@click.option(
    "--tls-certificate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="PEM file of the page's own certificate; mqd cert create NAME --host HOST creates one.",
)
@click.option(
    "--tls-key",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="PEM file of the certificate's private key, if it is not in the same file.",
)
@click.option(
    "--metrics",
    multiple=True,
    metavar="URL",
    help="A broker's metrics page, for rates and disks; give one for each broker.",
)
@click.option(
    "--metrics-token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the token of the metrics pages (the brokers' metrics.token.file).",
)
@click.option(
    "--metrics-ca",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="PEM file of the CA that signed the metrics pages' certificates, if it is not one of the system's.",
)
@click.option(
    "--audit",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append a line for each change to this file.  [default: stderr]",
)
def command(
    settings: Settings,
    listen: str,
    read_only: bool,
    hosts: tuple[str, ...],
    tls_certificate: Path | None,
    tls_key: Path | None,
    metrics: tuple[str, ...],
    metrics_token_file: Path | None,
    metrics_ca: Path | None,
    audit: Path | None,
) -> None:
    """Serve a web console for the cluster: health, topics, records, groups.

    It is a client of the cluster and works with any cluster that speaks the Kafka protocol. By
    default it listens on this host's loopback address; on other addresses it needs a login and TLS.
    If the cluster's listener uses SASL (--client-config), each user logs in to the console and acts
    with that user's permissions.
    """
    if any(not url.startswith(("http://", "https://")) for url in metrics):
        raise CliError("--metrics takes the URL of a metrics page, as mqd status shows it", EXIT_USAGE)
    host, port = parse_listen(listen)
    checked_options = checked(
        Options(
            settings.bootstrap,
            client_security.from_file(),
            host,
            port,
            frozenset(hosts),
            is_read_only=read_only,
            certificate=tls_certificate,
            key=tls_key or tls_certificate,
            metrics=metrics,
            metrics_token_file=metrics_token_file,
            metrics_ca_file=metrics_ca,
            audit=audit,
        )
    )
    server = server_of(checked_options)
    listener = _listen(host, port)
    display_host = f"[{host}]" if ":" in host else host
    click.echo(
        f"console of {settings.bootstrap} on http{'s' if checked_options.has_tls else ''}"
        f"://{display_host}:{listener.getsockname()[1]}/ (ctrl-C stops it)"
    )
    server.run(sockets=[listener])


def server_of(options: Options) -> uvicorn.Server:
    """Raises CliError."""
    try:
        import uvicorn

        from mqd.console.app import application
    except ModuleNotFoundError as error:
        raise CliError(f"{error.name} is not installed; pip install 'mqd[console]'") from None
    if options.certificate is not None and options.key is not None:
        _check_pair(options.certificate, options.key)
    return uvicorn.Server(
        uvicorn.Config(
            application(options),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            http="h11",
            loop="asyncio",
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
            ssl_certfile=str(options.certificate) if options.certificate else None,
            ssl_keyfile=str(options.key) if options.key else None,
        )
    )


def _check_pair(certificate: Path, key: Path) -> None:
    """Raises CliError: the server's own error would be less clear, or it would ask for a password."""

    def reject_password() -> str:
        raise CliError(f"--tls-key {key} has a password; openssl pkey -in {key} -out FILE writes it without one")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, reject_password)
    except ssl.SSLError as error:
        raise CliError(
            f"--tls-certificate {certificate}: {error.reason or error}; give a PEM file with the certificate, and its"
            " key in the same file or with --tls-key"
        ) from None
    except OSError as error:
        raise CliError(f"--tls-certificate {certificate}, --tls-key {key}: {error.strerror or error}") from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=CONNECTIONS_MAX
        )
    except OSError as error:
        raise CliError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address or port with --listen"
        ) from None
