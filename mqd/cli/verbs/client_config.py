"""`mqd client-config`: client settings for other programs, each in its own format."""

import json
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from mqd.cli.common import CliError, Settings, options
from mqd.security import client
from mqd.security.client import TOKEN_AUTH

FORMATS = {
    "java": "properties for Java clients and Kafka's tools (--command-config)",
    "librdkafka": "properties for librdkafka, and for `mqd --client-config`",
    "kcat": "the same, for kcat -F",
    "python": "a dictionary for confluent_kafka, mqd.Producer and mqd.Consumer",
    "spark": "options for Spark's format('mqd') and format('kafka'), one per line",
}
# librdkafka's name -> Java's
_JAVA_NAMES = {"sasl.mechanisms": "sasl.mechanism", "ssl.ca.location": "ssl.truststore.location"}
_LOGIN_MODULES = {"PLAIN": "plain.PlainLoginModule"}


def _escape_for_java(text: str) -> str:
    """The text as a value in Java's properties syntax, which Java reads as ISO-8859-1."""
    return "".join(char if char.isascii() else _as_utf16(char) for char in text.replace("\\", "\\\\"))


def _as_utf16(char: str) -> str:
    return "".join(f"\\u{unit:04x}" for (unit,) in struct.iter_unpack(">H", char.encode("utf-16-be")))


def with_java_names(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings for Java clients: renamed, with credentials as a JAAS configuration."""
    java_settings = {
        _JAVA_NAMES.get(name, name): value
        for name, value in settings.items()
        if name not in ("sasl.username", "sasl.password", TOKEN_AUTH, "ssl.certificate.location", "ssl.key.location")
    }
    if settings.get("ssl.ca.location"):
        java_settings["ssl.truststore.type"] = "PEM"
    if settings.get("ssl.certificate.location"):
        java_settings["ssl.keystore.type"] = "PEM"
        for part, location in (("certificate.chain", "ssl.certificate.location"), ("key", "ssl.key.location")):
            java_settings[f"ssl.keystore.{part}"] = Path(settings[location]).read_text().strip().replace("\n", "\\n")
    if settings.get("sasl.username"):
        module = _LOGIN_MODULES.get(settings.get("sasl.mechanisms", ""), "scram.ScramLoginModule")
        java_settings["sasl.jaas.config"] = client.jaas_config(
            module, settings["sasl.username"], settings.get("sasl.password", ""), settings.get(TOKEN_AUTH) == "true"
        )
    return java_settings


def format_settings(file_format: str, bootstrap: str, settings: Mapping[str, str]) -> str:
    """The text of a settings file in this format."""
    if file_format in ("java", "spark"):
        named_settings = {"bootstrap.servers": bootstrap, **with_java_names(settings)}
        prefix = "kafka." if file_format == "spark" else ""
        return "".join(
            f"{prefix}{name}={value if name.startswith('ssl.keystore.') else _escape_for_java(value)}\n"
            for name, value in named_settings.items()
        )
    # without TOKEN_AUTH: librdkafka has no such setting, and brokers recognize a token without it
    named_settings = {
        "bootstrap.servers": bootstrap,
        **{name: value for name, value in settings.items() if name != TOKEN_AUTH},
    }
    if file_format == "python":
        return f"settings = {json.dumps(named_settings, indent=4, ensure_ascii=False)}\n"
    return "".join(f"{name}={value}\n" for name, value in named_settings.items())


def save(file: Path, text: str) -> None:
    """Writes a file that only this user can read, because it contains a password."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as opened:
        os.fchmod(fd, 0o600)
        opened.write(text)


def _ask_password() -> str:
    """Prompts for the password; without a terminal, reads it as a line of stdin."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        password = sys.stdin.readline().rstrip("\r\n")
        if not password:
            raise CliError("there is no terminal to ask for the password: give --password-file FILE", 2) from None
        return password
    return str(click.prompt("Password", hide_input=True, err=True))


@click.command(short_help="Write the settings that a client needs to connect to the cluster.")
@click.argument("file_format", metavar="FORMAT", type=click.Choice(list(FORMATS)))
@click.option("--user", help="A user other than that of --client-config; prompts for the password.")
@click.option(
    "--password-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File with that password."
)
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write.  [default: stdout]")
@options
def command(
    settings: Settings, file_format: str, user: str | None, password_file: Path | None, out: Path | None
) -> int:
    """Write the settings that a client needs to connect to the cluster.

    \b
    java        properties for Java clients and Kafka's tools (--command-config)
    librdkafka  properties for librdkafka, and for mqd --client-config
    kcat        the same, for kcat -F
    python      a dictionary for confluent_kafka, mqd.Producer and mqd.Consumer
    spark       options for Spark's format("mqd") and format("kafka"), one per line

    Certificates and protocol are those of --client-config.
    """
    from mqd.cli import client_security

    client_settings = dict(client_security.current().settings)
    if user is not None:
        if "sasl.mechanisms" not in client_settings:
            raise CliError(
                "--user needs the settings of a listener with SASL; name the file that has them: --client-config FILE"
            )
        client_settings["sasl.username"] = user
        client_settings["sasl.password"] = password_file.read_text().rstrip("\n") if password_file else _ask_password()
    text = format_settings(file_format, settings.bootstrap, client_settings)
    if out is None:
        click.echo(text, nl=False)
    else:
        save(out, text)
    return 0
