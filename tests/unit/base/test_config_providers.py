"""References in a broker's configuration to values kept elsewhere."""

from pathlib import Path

import pytest

from mqd.base import paths
from mqd.base.config import load_broker, validate_broker_dynamic
from mqd.base.property_values import ConfigError
from mqd.keeper import settings

KAFKA = "org.apache.kafka.common.config.provider."
PASSWORD = "ssl.keystore.password"


@pytest.fixture
def vault(tmp_path: Path) -> Path:
    (tmp_path / "secrets.properties").write_text("key\\ store=hidden\\u0021\nempty=\n")
    (tmp_path / "token").write_text("of a file\n")
    return tmp_path


def loaded(text: str, environment=None, **others: str) -> str | None:
    given = {name.replace("_", "."): value for name, value in others.items()}
    return load_broker(None, environment or {}, {PASSWORD: text, **given}).get(PASSWORD)


def test_the_three_providers_resolve_where_none_is_declared(vault):
    assert loaded(f"${{file:{vault}/secrets.properties:key store}}") == "hidden!"
    assert loaded(f"${{file:{vault}/secrets.properties:empty}}") == ""
    assert loaded(f"${{dir:{vault}:token}}") == "of a file"
    assert loaded("a${env:ONE}b${env:TWO}", {"ONE": "1", "TWO": "${env:ONE}"}) == "a1b${env:ONE}"
    assert loaded("${vault:path:key} $1 ${x}") == "${vault:path:key} $1 ${x}"


def test_kafkas_declarations_of_providers_are_accepted(vault, tmp_path):
    file = tmp_path / "server.properties"
    file.write_text(
        f"config.providers=secrets, environment\n"
        f"config.providers.secrets.class={KAFKA}FileConfigProvider\n"
        f"config.providers.secrets.param.allowed.paths=/nowhere,{vault}\n"
        f"config.providers.environment.class={KAFKA}EnvVarConfigProvider\n"
        f"config.providers.environment.param.allowlist.pattern=NODE_.*\n"
        f"{PASSWORD}=${{secrets:{vault}/secrets.properties:key store}}\n"
        "node.id=${environment:NODE_ID}\n"
        "broker.rack=${file:not:declared}\n"
    )
    config = load_broker(file, {"NODE_ID": "7"}, {})
    assert (config[PASSWORD], config["node.id"], config["broker.rack"]) == ("hidden!", "7", "${file:not:declared}")
    assert not [name for name in config if name.startswith("config.providers.")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("${file:/nowhere/x.properties:key}", "/nowhere/x.properties: No such file or directory"),
        ("${file:VAULT/secrets.properties:other}", "VAULT/secrets.properties has no key other"),
        ("${file:VAULT/secrets.properties}", "it must have the form ${file:PATH:KEY}"),
        ("${dir:VAULT:other}", "VAULT has no file other"),
        ("${dir:VAULT:../token}", "has no file ../token"),
        ("${env:OTHER}", "the environment has no such variable"),
        ("${env:a:b}", "it must have the form ${env:NAME}"),
    ],
)
def test_an_unresolvable_reference_stops_the_start(vault, text, why):
    with pytest.raises(ConfigError) as error:
        loaded(text.replace("VAULT", str(vault)))
    assert why.replace("VAULT", str(vault)) in str(error.value)
    assert str(error.value).startswith(f"command line: {PASSWORD}: $")


def test_a_provider_reads_only_allowed_paths_and_names(vault):
    declared = {"config.providers": "f,e", "config.providers.f.class": f"{KAFKA}FileConfigProvider"}
    declared |= {"config.providers.e.class": f"{KAFKA}EnvVarConfigProvider"}
    declared |= {"config.providers.f.param.allowed.paths": f"{vault}/sub"}
    declared |= {"config.providers.e.param.allowlist.pattern": "A.*"}
    for text in (f"${{f:{vault}/sub/../secrets.properties:key store}}", "${e:BA}"):
        with pytest.raises(ConfigError, match=r"allowed\.paths|allowlist"):
            load_broker(None, {"BA": "secret"}, {**declared, PASSWORD: text})


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"config.providers": "a"}, "config.providers.a.class is not set"),
        ({"config.providers": "a", "config.providers.a.class": "com.Vault"}, "loads no Java classes"),
        ({"config.providers.b.class": f"{KAFKA}FileConfigProvider"}, "lists no provider with such a setting"),
    ],
)
def test_an_unsupported_declaration_stops_the_start(declared, why):
    with pytest.raises(ConfigError, match=why):
        load_broker(None, {}, declared)


def test_error_messages_do_not_reveal_referenced_values(vault):
    for name in ("node.id", "sasl.enabled.mechanisms", "log.cleanup.policy"):
        with pytest.raises(ConfigError) as error:
            load_broker(None, {"SECRET": "hunter2"}, {name: "${env:SECRET}"})
        assert "hunter2" not in str(error.value) and "cannot be the value that ${env:SECRET} refers to" in str(
            error.value
        )


def test_clients_cannot_have_files_read(vault):
    reference = f"${{dir:{vault}:token}}"
    with pytest.raises(ConfigError):
        validate_broker_dynamic({"log.retention.ms": reference})


def test_processes_do_not_inherit_the_variables_of_secrets(vault, tmp_path):
    secrets: set[str] = set()
    environment = {"MQD_SSL_KEY_PASSWORD": "one", "STORE": "two", "NODE": "3", "MQD_BROKER_RACK": "r"}
    load_broker(None, environment, {PASSWORD: "${env:STORE}", "node.id": "${env:NODE}"}, None, secrets)
    assert secrets == {"MQD_SSL_KEY_PASSWORD", "STORE"}


def test_the_keeper_removes_what_up_resolved(tmp_path):

    places = paths.layout(tmp_path / "data")
    paths.create(places)
    settings.save(settings.resolve(load_broker(None, {"P": "x"}, {PASSWORD: "${env:P}"}), places))
    assert places.resolved_config.stat().st_mode & 0o777 == 0o600
    environment = {"MQD_DATA_DIR": str(places.data_dir), "MQD_RUN_RESOLVED": str(places.resolved_config)}
    assert settings.load(environment).config[PASSWORD] == "x"
    assert not places.resolved_config.exists()
