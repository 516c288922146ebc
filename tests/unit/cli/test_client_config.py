import ast
import stat

from click.testing import CliRunner

from mqd.base.properties_file import parse_properties
from mqd.cli.main import cli
from mqd.cli.verbs.client_config import FORMATS, format_settings
from mqd.security import client

SETTINGS = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanisms": "SCRAM-SHA-512",
    "sasl.username": "alice",
    "sasl.password": 'a"b\\c;d=e',
    "ssl.ca.location": "/etc/mqd/ca.pem",
}


def test_java_and_librdkafka_mean_the_same():
    for form in ("java", "librdkafka", "kcat"):
        text = format_settings(form, "h:9092", SETTINGS)
        if form == "java":
            found = {name: value for name, (value, _) in parse_properties(text).items()}
        else:
            found = dict(line.split("=", 1) for line in text.splitlines())
        assert found["bootstrap.servers"] == "h:9092"
        assert client.security_from_properties(found).settings == SETTINGS, form


def test_only_java_clients_need_the_token_option():
    settings = {**SETTINGS, "sasl.tokenauth": "true"}
    java = {name: value for name, (value, _) in parse_properties(format_settings("java", "h:9092", settings)).items()}
    assert java["sasl.jaas.config"].endswith(' tokenauth="true";') and "sasl.tokenauth" not in java
    assert client.security_from_properties(java).settings == settings
    for form in ("librdkafka", "kcat", "python"):
        assert format_settings(form, "h:9092", settings) == format_settings(form, "h:9092", SETTINGS)


def test_spark_and_python():
    spark = {name: value for name, (value, _) in parse_properties(format_settings("spark", "h:9092", SETTINGS)).items()}
    java = {name: value for name, (value, _) in parse_properties(format_settings("java", "h:9092", SETTINGS)).items()}
    assert spark == {f"kafka.{name}": value for name, value in java.items()}
    python = format_settings("python", "h:9092", SETTINGS)
    assert ast.literal_eval(python.removeprefix("settings = ")) == {"bootstrap.servers": "h:9092", **SETTINGS}


def test_a_client_certificate_for_java(tmp_path):
    (tmp_path / "cert.pem").write_text("-----BEGIN-----\nA\n-----END-----\n")
    (tmp_path / "key.pem").write_text("-----BEGIN K-----\nB\n-----END K-----\n")
    settings = {
        "security.protocol": "SSL",
        "ssl.certificate.location": str(tmp_path / "cert.pem"),
        "ssl.key.location": str(tmp_path / "key.pem"),
    }
    found = {name: value for name, (value, _) in parse_properties(format_settings("java", "h:9092", settings)).items()}
    assert found["ssl.keystore.certificate.chain"] == "-----BEGIN-----\nA\n-----END-----"
    assert found["ssl.keystore.key"] == "-----BEGIN K-----\nB\n-----END K-----" and found["ssl.keystore.type"] == "PEM"


def test_the_command(tmp_path, monkeypatch):
    file, out, password = tmp_path / "admin.properties", tmp_path / "bob.properties", tmp_path / "password"
    file.write_text(format_settings("librdkafka", "h:9092", {**SETTINGS, "sasl.password": "secret"}))
    password.write_text("s3cret\n")
    monkeypatch.setenv("MQD_CLIENT_CONFIG", "")
    arguments = ["--client-config", str(file), "-b", "h:9093", "client-config", "librdkafka", "--user", "bob"]
    done = CliRunner().invoke(cli, [*arguments, "--password-file", str(password), "-o", str(out)])
    assert done.exit_code == 0 and not done.output, done.output
    found = dict(line.split("=", 1) for line in out.read_text().splitlines())
    assert found == {**SETTINGS, "bootstrap.servers": "h:9093", "sasl.username": "bob", "sasl.password": "s3cret"}
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    requested = CliRunner().invoke(cli, arguments, input="s3cret\n")
    assert requested.exit_code == 0 and "sasl.password=s3cret" in requested.output
    silent = CliRunner().invoke(cli, arguments)
    assert silent.exit_code in (1, 2) and "Password" in silent.output or "--password-file" in silent.output
    monkeypatch.setenv("MQD_CLIENT_CONFIG", "")
    plain = CliRunner().invoke(cli, ["client-config", "java", "--user", "bob"])
    assert plain.exit_code != 0 and set(FORMATS) >= {"java", "kcat"}


def test_characters_outside_ascii():
    """Java reads a properties file as ISO-8859-1, and a Python literal has no surrogates."""
    settings = {**SETTINGS, "sasl.password": "ä☃\N{GRINNING FACE}"}
    java = format_settings("java", "h:9092", settings)
    assert java.isascii() and '="\\u00e4\\u2603\\ud83d\\ude00";' in java
    python = format_settings("python", "h:9092", settings)
    assert ast.literal_eval(python.removeprefix("settings = "))["sasl.password"] == settings["sasl.password"]
