"""`mqd key`: key files with which clients encrypt values (docs/payload-encryption.md)."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import click

from mqd.cli.common import CliError, emit_json, emit_table

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
_ID = click.option(
    "--id", "key_id", metavar="ID", help="Id of the new key; stored unencrypted in each value.  [default: random]"
)


@click.group(short_help="Key files with which clients encrypt values.")
def command() -> None:
    """Key files with which clients encrypt values: encryption.key.provider=file:FILE.

    The first key seals values; every key can open them.
    """


@command.command("create")
@_FILE
@_ID
def create(file: Path, key_id: str | None) -> None:
    """Create a key, in a new FILE or at the end of an existing one. A key added to an existing FILE
    only opens values, until `rotate` makes it the key that seals them.
    """
    _add(file, _read(file) if file.exists() else {}, key_id, is_first=False)


@command.command("rotate")
@_FILE
@click.argument("key_id", required=False, metavar="[ID]")
def rotate(file: Path, key_id: str | None) -> None:
    """Make clients seal values with the key ID of FILE, or with a new key if ID is omitted. The other
    keys can still open values.

    Clients switch to the new key with their next data key, within an hour. If readers have their
    own files, `create` the key first, give every reader the file, then `rotate` to the new key.
    """
    keys = _read(file)
    if key_id is None:
        _add(file, keys, None, is_first=True)
    elif key_id not in keys:
        raise CliError(f"{file} has no key {key_id!r}; it has {', '.join(keys)}")
    else:
        _write(file, {key_id: keys[key_id], **keys})
        click.echo(f"{file}: {key_id} seals from now on; all {len(keys)} keys can open values")


@command.command("list")
@_FILE
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def list_(file: Path, output_format: str) -> None:
    """List the ids of the keys in FILE, and show which one seals."""
    rows = [(key_id, not index) for index, key_id in enumerate(_read(file))]
    if output_format == "json":
        emit_json([{"id": key_id, "seals": seals} for key_id, seals in rows])
    else:
        emit_table(("KEY", "USE"), [(key_id, "seals and opens" if seals else "opens") for key_id, seals in rows])


def _read(file: Path) -> dict[str, bytes]:
    from mqd.client.encryption import keys

    return keys.parse(file.read_text("utf-8"), str(file))


def _add(file: Path, key_by_id: Mapping[str, bytes], key_id: str | None, is_first: bool) -> None:
    from mqd.client.encryption import keys

    name = secrets.token_hex(4) if key_id is None else key_id
    if name in key_by_id:
        raise CliError(f"{file} already has a key {name!r}")
    new_keys = {name: keys.new_key()}
    all_keys = {**new_keys, **key_by_id} if is_first else {**key_by_id, **new_keys}
    if not keys.is_key_id(name):
        raise CliError(f"{name!r} is not a key id: 1 to 255 bytes without commas or blanks, not starting with #")
    _write(file, all_keys)
    use = "seals from now on" if is_first or not key_by_id else "can open values; it seals them after mqd key rotate"
    click.echo(f"{file}: {name} {use}")


def _write(file: Path, key_by_id: Mapping[str, bytes]) -> None:
    """Writes atomically. A new file is readable by its owner only; an existing one keeps its mode."""
    from mqd.client.encryption import keys

    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as opened:
            opened.write("# mqd encryption keys: the first key seals values, every key can open them\n")
            opened.write(keys.format_keys(key_by_id))
            os.fchmod(opened.fileno(), mode)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
