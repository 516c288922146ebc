"""`mqd cert`: certificates of the CA that `mqd up --secure` created."""

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqd.base.paths import default_data_dir
from mqd.cli.common import CliError

if TYPE_CHECKING:
    from mqd.cli.secure import Files
    from mqd.security.pki import CertifiedKey

_DATA_DIR = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Data directory of the broker.  [env: MQD_DATA_DIR; default: ~/.local/share/mqd]",
)


@click.group(short_help="Certificates of a secured broker.")
def command() -> None:
    """Certificates of the CA that `mqd up --secure` created in DATA_DIR/secure."""


@command.command("status")
@_DATA_DIR
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def status(data_dir: Path | None, output_format: str) -> int:
    """Show how long the certificates are valid. The exit status is 1 if a certificate has expired, or
    expires within ten days.
    """
    from mqd.cli import secure
    from mqd.security import pki

    paths = _secured_files(data_dir)
    now = datetime.datetime.now(datetime.UTC)
    try:
        files = [paths.ca, paths.broker, *([paths.host] if paths.host.exists() else [])]
        expiry_times = {file.name: pki.expiry_time(file.read_bytes()) for file in files}
    except (OSError, ValueError) as error:
        raise CliError(f"a certificate in {paths.directory} cannot be read: {error}") from None
    days_left = {name: (expiry_time - now).days for name, expiry_time in expiry_times.items()}
    if output_format == "json":
        click.echo(
            json.dumps(
                {
                    name: {"expires": expiry_time.isoformat(), "days_left": days_left[name]}
                    for name, expiry_time in expiry_times.items()
                }
            )
        )
    else:
        for name, expiry_time in expiry_times.items():
            click.echo(f"{name}: until {expiry_time:%Y-%m-%d %H:%M} UTC, {days_left[name]} days left")
    return 0 if min(days_left.values()) >= secure.WARN_DAYS else 1


@command.command("renew")
@_DATA_DIR
def renew(data_dir: Path | None) -> int:
    """Renew the broker's certificates now: those it presents to clients and to other hosts. A running
    broker uses the new certificates within seconds; open connections continue.
    """
    from mqd.cli import secure

    paths = _secured_files(data_dir)
    for file in secure.renew(paths, datetime.datetime.now(datetime.UTC)):
        click.echo(f"{file} is renewed; a running broker uses it within seconds")
    return 0


@command.command("host")
@click.argument("node_id", type=click.IntRange(0))
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File to write.")
@_DATA_DIR
def host(node_id: int, out: Path, data_dir: Path | None) -> int:
    """Make the certificate and key with which host NODE_ID authenticates to other hosts, in one PEM
    file.

    For hosts that do not have ca.key: copy the file to DATA_DIR/secure/host.pem of that host. A
    host with ca.key makes its own certificate when it starts.
    """
    from mqd.cli.verbs.client_config import save
    from mqd.security import pki

    paths = _secured_files(data_dir)
    try:
        pair = pki.issue_host(_load_ca(paths), node_id, datetime.datetime.now(datetime.UTC))
    except ValueError as error:
        raise CliError(f"the CA in {paths.directory} cannot be used: {error}") from None
    save(out, (pair.key + pair.certificate).decode())
    click.echo(f"{out}: the certificate of host {node_id}, valid for {pki.CERTIFICATE_DAYS} days")
    return 0


@command.command("require")
@_DATA_DIR
def require(data_dir: Path | None) -> int:
    """Make this broker refuse hosts that do not encrypt, beginning with its next start. Only for
    brokers that were secured by an earlier release: run this command once all hosts run this release.
    Brokers secured by this release already refuse such hosts.
    """
    paths = _secured_files(data_dir)
    if not paths.host.exists():
        raise CliError(f"{paths.host} is missing; start the broker or run `mqd cert host` to create it")
    paths.plaintext_allowed.unlink(missing_ok=True)
    click.echo("beginning with its next start, this broker refuses hosts that do not encrypt (cluster.tls=required)")
    return 0


@command.command("create")
@click.argument("name")
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="Name or address of a broker. May be repeated.")
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File to write.")
@_DATA_DIR
def create(name: str, hosts: tuple[str, ...], out: Path, data_dir: Path | None) -> int:
    """Make a certificate for the client NAME, or with --host for a broker, and its key, in one PEM
    file.

    A listener with ssl.client.auth=required accepts client certificates issued by this CA. The
    principal is the certificate's name, User:CN=NAME, unless ssl.principal.mapping.rules says
    otherwise.
    """
    from mqd.cli import secure
    from mqd.cli.verbs.client_config import save
    from mqd.security import pki

    paths = _secured_files(data_dir)
    try:
        pair = pki.issue(_load_ca(paths), name, list(hosts), datetime.datetime.now(datetime.UTC))
    except ValueError as error:
        raise CliError(f"the CA in {paths.directory} cannot be used: {error}") from None
    save(out, (pair.key + pair.certificate).decode())
    names = secure.describe_certificate(name, hosts)
    click.echo(f"{out}: a certificate for {names}, valid for {pki.CERTIFICATE_DAYS} days")
    return 0


def _load_ca(paths: "Files") -> "CertifiedKey":
    """The CA's certificate and key. Raises CliError."""
    from mqd.security import pki

    try:
        return pki.CertifiedKey(paths.ca.read_bytes(), paths.ca_key.read_bytes())
    except OSError as error:
        raise CliError(f"the CA in {paths.directory} cannot be used: {error}") from None


def _secured_files(data_dir: Path | None) -> "Files":
    """The files of a secured broker. Raises CliError."""
    from mqd.cli import secure

    directory = data_dir or default_data_dir()
    if not secure.is_secured(directory):
        raise CliError(f"{directory} has no certificates; `mqd up --secure` creates them")
    return secure.files(directory)
