"""`mqd cert`: certificates of the authority that `mqd up --secure` made."""

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqd.base.paths import default_data_dir
from mqd.cli.common import CliError

if TYPE_CHECKING:
    from mqd.cli.secure import Files

_DATA_DIR = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Of the broker.  [env: MQD_DATA_DIR; default: ~/.local/share/mqd]",
)


@click.group(short_help="Certificates of a secured broker.")
def command() -> None:
    """Certificates of the authority that `mqd up --secure` made in DATA_DIR/secure."""


@command.command("status")
@_DATA_DIR
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def status(data_dir: Path | None, output_format: str) -> int:
    """Until when the certificates hold. Exit status 1: one has ended, or ends within ten days."""
    from mqd.cli import secure
    from mqd.security import pki

    places = _secured(data_dir)
    now = datetime.datetime.now(datetime.UTC)
    try:
        ends = {file.name: pki.expires(file.read_bytes()) for file in (places.ca, places.broker)}
    except (OSError, ValueError) as error:
        raise CliError(f"a certificate in {places.directory} cannot be read: {error}") from None
    left = {name: (end - now).days for name, end in ends.items()}
    if output_format == "json":
        found = {name: {"expires": end.isoformat(), "days_left": left[name]} for name, end in ends.items()}
        click.echo(json.dumps(found))
    else:
        for name, end in ends.items():
            click.echo(f"{name}: until {end:%Y-%m-%d %H:%M} UTC, {left[name]} days left")
    return 0 if min(left.values()) >= secure.WARN_DAYS else 1


@command.command("renew")
@_DATA_DIR
def renew(data_dir: Path | None) -> int:
    """Make the broker a new certificate now. A running broker uses it within seconds; open
    connections go on.
    """
    from mqd.cli import secure

    places = _secured(data_dir)
    secure.renew(places, datetime.datetime.now(datetime.UTC))
    click.echo(f"{places.broker} is renewed; a running broker uses it within seconds")
    return 0


@command.command("create")
@click.argument("name")
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="Of a broker: a name or address. May be repeated.")
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File to write.")
@_DATA_DIR
def create(name: str, hosts: tuple[str, ...], out: Path, data_dir: Path | None) -> int:
    """Make a certificate for the client NAME, or with --host for a broker, and its key, in one PEM
    file.

    A listener with ssl.client.auth=required takes clients' certificates of this authority. The
    principal is the certificate's name, User:CN=NAME, unless ssl.principal.mapping.rules say
    otherwise.
    """
    from mqd.cli import secure
    from mqd.cli.verbs.connect import save
    from mqd.security import pki

    places = _secured(data_dir)
    try:
        authority = pki.Pair(places.ca.read_bytes(), places.ca_key.read_bytes())
        pair = pki.issue(authority, name, list(hosts), datetime.datetime.now(datetime.UTC))
    except (OSError, ValueError) as error:
        raise CliError(f"the authority in {places.directory} cannot be used: {error}") from None
    save(out, (pair.key + pair.certificate).decode())
    click.echo(f"{out}: a certificate for {secure.described(name, hosts)}, {pki.CERTIFICATE_DAYS} days")
    return 0


def _secured(data_dir: Path | None) -> "Files":
    """The files of a secured broker. Raises CliError."""
    from mqd.cli import secure

    where = data_dir or default_data_dir()
    if not secure.is_secured(where):
        raise CliError(f"{where} has no certificates; `mqd up --secure` makes them")
    return secure.files(where)
