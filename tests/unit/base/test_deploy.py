"""The files of deploy/, compared with the settings, ports and probes of a broker."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mqd.acceptor.metrics import health
from mqd.base import cluster_config, listeners
from mqd.base.config import load_broker
from mqd.cli.verbs.up import command as up
from mqd.keeper.loop import LEAVE_S, SHUTDOWN_GRACE_S
from mqd.keeper.settings import properties_environment

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
VERSIONS = ("1.28", "1.32")
BYTES = {"Mi": 1 << 20, "Gi": 1 << 30, "m": 1 << 20}


def size_bytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()  # type: ignore[union-attr]
    return int(number) * BYTES[unit]


@pytest.fixture(scope="module")
def resources() -> dict[tuple[str, str], Any]:
    found = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


@pytest.fixture(scope="module")
def pod(resources: dict[tuple[str, str], Any]) -> Any:
    return resources["StatefulSet", "mqd"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def config(resources: dict[tuple[str, str], Any], pod: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The configuration resolved by the broker of pod mqd-1."""
    file = tmp_path_factory.mktemp("config") / "server.properties"
    file.write_text(resources["ConfigMap", "mqd"]["data"]["server.properties"])
    given = {
        "metadata.name": "mqd-1",
        "metadata.namespace": "shop",
        "metadata.labels['apps.kubernetes.io/pod-index']": "1",
    }
    environment: dict[str, str] = {}
    for one in pod["containers"][0]["env"]:
        value = one["value"] if "value" in one else given[one["valueFrom"]["fieldRef"]["fieldPath"]]
        environment[one["name"]] = re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], value)
    return load_broker(file, properties_environment(environment), {})


def test_the_broker_accepts_the_pods_settings(config: dict[str, str], pod: Any) -> None:
    cluster_config.check(config)
    (clients,) = listeners.parse_listeners(config)
    places = cluster_config.cluster_listeners(config)
    metrics = listeners.metrics_listener(config)
    assert places is not None and metrics is not None and config["node.id"] == "1"
    assert places.controller.advertised_host == "mqd-1.mqd.shop.svc.cluster.local"
    assert f"{places.controller.advertised_host}:{places.controller.port}" in cluster_config.seeds(config)
    ports = {one["name"]: one["containerPort"] for one in pod["containers"][0]["ports"]}
    assert ports == {
        "clients": clients.port,
        "records": places.inter_broker.port,
        "controllers": places.controller.port,
        "gossip": places.controller.port,
        "metrics": metrics.port,
    }
    assert clients.has_tls and metrics.has_tls


def test_the_pods_command_is_valid(pod: Any) -> None:
    verb, *arguments = pod["containers"][0]["args"]
    arguments = [word for word in arguments if word not in ("--config", "/etc/mqd/server.properties")]
    assert verb == "up" and up.make_context("up", arguments).params["data_dir"] == Path("/var/lib/mqd/data")


def test_probes_use_endpoints_of_the_broker(pod: Any) -> None:
    container = pod["containers"][0]
    asked = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")}
    assert {probe: one["path"] for probe, one in asked.items()} == {
        "startup": health.LIVE,
        "liveness": health.LIVE,
        "readiness": health.READY,
    }
    assert all((one["port"], one["scheme"]) == ("metrics", "HTTPS") for one in asked.values())
    liveness = container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > 60  # the broker's watchdog acts first


def test_the_grace_period_is_long_enough(pod: Any) -> None:
    supervisord = configparser.RawConfigParser()
    supervisord.read(ROOT / "mqd" / "supervisord.conf")
    keeper_s = int(supervisord["program:mqd-keeper"]["stopwaitsecs"])
    assert pod["terminationGracePeriodSeconds"] > keeper_s > LEAVE_S + SHUTDOWN_GRACE_S
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["mqd"]
    assert int(compose["stop_grace_period"].removesuffix("s")) > keeper_s


def test_shared_memory_has_room_and_every_mount_a_volume(config: dict[str, str], pod: Any) -> None:
    workers = int(config["worker.count"])
    needed = (workers + 2) * int(config["receive.arena.bytes"]) + workers * int(config["large.request.memory.bytes"])
    volumes = {one["name"]: one for one in pod["volumes"]}
    memory = volumes["shared-memory"]["emptyDir"]
    assert memory["medium"] == "Memory" and size_bytes(memory["sizeLimit"]) > needed
    assert size_bytes(pod["containers"][0]["resources"]["limits"]["memory"]) > 2 * size_bytes(memory["sizeLimit"])
    for container in (*pod["containers"], *pod["initContainers"]):
        names = {one["name"] for one in container["volumeMounts"]}
        assert names <= volumes.keys() | {"data"} and container["securityContext"]["readOnlyRootFilesystem"] is True
    mounted = {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert {"/dev/shm", "/tmp", "/var/lib/mqd"} <= mounted


def test_pods_do_not_wait_for_each_other(resources: dict[tuple[str, str], Any]) -> None:
    assert resources["StatefulSet", "mqd"]["spec"]["podManagementPolicy"] == "Parallel"
    assert resources["Service", "mqd"]["spec"]["publishNotReadyAddresses"] is True


def test_compose(tmp_path: Path) -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["mqd"]
    verb, *arguments = service["command"]
    assert verb == "up" and up.make_context("up", arguments).params["workers"] == 2
    config = load_broker(None, properties_environment(service["environment"]), {})
    (clients,) = listeners.parse_listeners(config)
    (published,) = service["ports"]
    assert published == f"127.0.0.1:{clients.port}:{clients.port}"
    assert f"/health/{health.READY.removeprefix('/health/')}" in service["healthcheck"]["test"][-1]
    assert size_bytes(service["shm_size"]) == 1 << 30


def test_the_image_s_user_and_paths_are_those_of_the_pod(pod: Any) -> None:
    text = (DEPLOY / "Containerfile").read_text()
    user = pod["securityContext"]["runAsUser"]
    assert f"--uid {user}" in text and f"USER {user}:{user}" in text
    copied = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    assert all((ROOT / name).exists() for name in copied) and {"mqd", "native", "pyproject.toml", "setup.py"} <= copied


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_schemas(resources: dict[tuple[str, str], Any], version: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="the schemas of Kubernetes have 22 MB: pip install kubernetes-validate"
    )
    for one in resources.values():
        validate.validate(one, version, strict=True)
