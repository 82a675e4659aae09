"""The Helm chart: rendering, refused values, and a start of the rendered container."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.namespace import OwnNamespace, unavailable_reason
from harness.polling import wait_until

from kvtier import __version__
from kvtier.server.config.loader import load

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "kvtier"
TOOLS = ROOT / "build" / "deploy" / "bin"
HELM = TOOLS / "helm"

needs_tools = pytest.mark.skipif(not HELM.exists(), reason="`make test-deploy` installs helm and the schemas")

FULL = {
    "config": {
        "tiers": [{"type": "lmdb", "size": "2GiB"}],
        "tenants": {"acme": {"quota": "25%"}},
        "limits": {"max_keys": 1048576, "max_message_bytes": "256MiB"},
        "retention": {"part": 0.25},
    },
    "tcp": {"enabled": True, "insecure": True},
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "groups": [{"name": "x", "rules": [{"alert": "X", "expr": "up == 0"}]}]},
    },
    "networkPolicy": {"metricsFrom": [{"podSelector": {}}], "tcpFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}]},
    "probes": {"type": "grpc"},
    "priorityClassName": "system-node-critical",
    "nodeSelector": {"gpu": "true"},
    "tolerations": [{"operator": "Exists"}],
    "extraEnv": [{"name": "KVTIER_LOG_LEVEL", "value": "debug"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "b"},
    "imagePullSecrets": [{"name": "c"}],
}
EXAMPLES = ROOT / "deploy" / "helm" / "examples"
WAYS = {
    **{file.stem: yaml.safe_load(file.read_text()) for file in EXAMPLES.glob("*.yaml")},
    "plain": {},
    "full": FULL,
    "emptyDir": {"data": {"type": "emptyDir", "sizeLimit": "20Gi"}, "probes": {"type": "exec"}},
    "none": {"data": {"type": "none"}, "networkPolicy": {"enabled": False}, "regionSize": "512Mi"},
    "shared": {"data": {"type": "none"}, "config": {"tiers": [{"type": "s3", "options": {"url": "s3://bucket/kv"}}]}},
}


def _helm(command: str, directory: Path, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    file = directory / "values.yaml"
    file.write_text(json.dumps(values))
    name = [] if command == "lint" else ["kvtier"]
    return subprocess.run(
        [
            HELM,
            command,
            *name,
            CHART,
            "--values",
            file,
            "--kube-version",
            "1.35.0",
            *(["--strict"] if command == "lint" else []),
        ],
        capture_output=True,
        text=True,
        env={"HOME": str(directory), "PATH": "/usr/bin:/bin"},
        check=False,
    )


def _rendered(directory: Path, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    done = _helm("template", directory, values)
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(done.stdout) if document}


@needs_tools
@pytest.mark.parametrize("way", WAYS)
def test_chart_lints_without_errors(tmp_path: Path, way: str) -> None:
    done = _helm("lint", tmp_path, WAYS[way])
    assert done.returncode == 0, done.stdout


@needs_tools
@pytest.mark.parametrize("version", ["1.27.0", "1.35.0"])
@pytest.mark.parametrize("way", WAYS)
def test_rendered_resources_match_the_schemas(tmp_path: Path, way: str, version: str) -> None:
    """An unknown field is an error. Resources of the Prometheus operator have no schema here."""
    documents = [found for found in _rendered(tmp_path, WAYS[way]).values() if "coreos" not in found["apiVersion"]]
    assert {"DaemonSet", "ConfigMap", "Service", "ServiceAccount"} <= {found["kind"] for found in documents}
    _validate(tmp_path, documents, version)


@needs_tools
def test_engine_example_matches_the_chart(tmp_path: Path) -> None:
    """The example is valid and uses the chart's socket path and user."""
    engine = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "vllm.yaml").read_text())
    _validate(tmp_path, [engine], "1.35.0")
    pod, server = engine["spec"]["template"]["spec"], _rendered(tmp_path, {})["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == server["securityContext"]["runAsUser"]
    sockets = {volume["name"]: volume for volume in server["volumes"]}["sockets"]["hostPath"]["path"]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "sockets"]
    assert volume["hostPath"]["path"] == sockets
    [endpoint] = [entry["value"] for entry in pod["containers"][0]["env"] if entry["name"] == "KVTIER_ENDPOINT"]
    assert endpoint == f"unix:{sockets}/kvtier.sock"


@needs_tools
@pytest.mark.parametrize("way", WAYS)
def test_server_reads_the_rendered_configuration(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values reach the server unchanged, with their types."""
    file = tmp_path / "kvtier.toml"
    rendered = _rendered(tmp_path, WAYS[way])
    file.write_text(rendered["ConfigMap"]["data"]["kvtier.toml"])
    environment = rendered["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]["env"]
    for entry in environment:
        if entry["name"] not in ("KVTIER_ENDPOINT", "KVTIER_LOG_FORMAT", "KVTIER_LOG_LEVEL") and "value" in entry:
            monkeypatch.setenv(entry["name"], entry["value"])
    config = load({}, file=str(file)).config
    assert config.listen[0] == "unix:/run/kvtier/kvtier.sock"
    assert len(config.listen) == (2 if way in ("full", "peers") else 1)
    assert config.region_size == (512 << 20 if way == "none" else 8 << 30)
    assert len(config.tiers) == {"none": 0, "valkey": 2, "s3": 2}.get(way, 1)
    if way == "full":
        assert (config.limits.max_keys, config.retention.part, config.tiers[0].size) == (1048576, 0.25, 2 << 30)
        assert [tenant.name for tenant in config.tenants] == ["acme"]


@needs_tools
@pytest.mark.parametrize("example", sorted(file.stem for file in EXAMPLES.glob("*.yaml")))
def test_secrets_of_the_examples_are_references(tmp_path: Path, example: str) -> None:
    """Files in the configuration come from mounted secrets, and keys in the environment do."""
    rendered = _rendered(tmp_path, WAYS[example])
    pod = rendered["DaemonSet"]["spec"]["template"]["spec"]
    [server] = pod["containers"]
    secrets = {volume["name"] for volume in pod["volumes"] if "secret" in volume}
    mounted = tuple(mount["mountPath"] for mount in server["volumeMounts"] if mount["name"] in secrets)
    named = re.findall(r'"(/etc/[^"]+)"', rendered["ConfigMap"]["data"]["kvtier.toml"])
    assert all(file.startswith(mounted) for file in named)
    referred = [entry for entry in server["env"] if "secretKeyRef" in entry.get("valueFrom", {})]
    assert named or referred
    command = re.search(r"--values (\S+)", (EXAMPLES / f"{example}.yaml").read_text())
    assert command is None or (ROOT / command[1]).exists()


@needs_tools
def test_service_account_has_the_configured_role(tmp_path: Path) -> None:
    annotations = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/kvtier"}
    rendered = _rendered(tmp_path, {"serviceAccount": {"annotations": annotations}})
    assert rendered["ServiceAccount"]["metadata"]["annotations"] == annotations
    assert "annotations" not in _rendered(tmp_path, {})["ServiceAccount"]["metadata"]


@needs_tools
def test_service_monitor_matches_the_alert_rules(tmp_path: Path) -> None:
    """The monitor selects the service and its port; its job name matches the rules."""
    rendered = _rendered(tmp_path, FULL)
    monitor, service = rendered["ServiceMonitor"]["spec"], rendered["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == [
        port["name"] for port in service["spec"]["ports"]
    ]
    job = service["metadata"]["labels"][monitor["jobLabel"]]
    jobs = set(re.findall(r'job=~"([^"]+)"', (ROOT / "dashboards" / "rules" / "alerts.yml").read_text()))
    assert jobs
    assert all(re.fullmatch(pattern, job) for pattern in jobs)
    rules = yaml.safe_load((ROOT / "dashboards" / "rules" / "alerts.yml").read_text())
    values = {"metrics": {"prometheusRule": {"enabled": True, "groups": rules["groups"]}}}
    assert _rendered(tmp_path, values)["PrometheusRule"]["spec"]["groups"] == rules["groups"]


@needs_tools
@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"regionSize": "8GiB"}, "regionSize"),
        ({"regionSize": "16Gi"}, "must exceed regionSize (16Gi) by 1Gi"),
        ({"regonSize": "8Gi"}, "regonSize"),
        ({"tcp": {"enabled": True}}, "unencrypted"),
        ({"tcp": {"enabled": True}, "config": {"tls": {"cert": "/c", "key": "/k"}}}, "clients are not authenticated"),
        ({"probes": {"type": "grpc"}}, "needs tcp.enabled"),
        ({"config": {"listen": "0.0.0.0:1"}}, "config"),
        ({"terminationGracePeriodSeconds": 30}, "terminationGracePeriodSeconds"),
        ({"runAsUser": 0}, "runAsUser"),
        ({"data": {"type": "none"}, "config": {"tiers": [{"type": "s3"}, {"type": "disk"}]}}, "type disk"),
        ({"config": {"tiers": [{"type": "valkey", "options": {"url": "valkey://a:b@c"}}]}}, "user or a password"),
        (
            {"config": {"auth": {"metrics": True}}, "metrics": {"serviceMonitor": {"enabled": True}}},
            "metrics.serviceMonitor.authorization",
        ),
    ],
)
def test_invalid_values_are_refused(tmp_path: Path, values: dict[str, Any], complaint: str) -> None:
    """Rendering fails with the name of the wrong value."""
    done = _helm("template", tmp_path, values)
    assert done.returncode != 0
    assert complaint in done.stderr


@needs_tools
def test_scrapes_use_the_configured_token(tmp_path: Path) -> None:
    """The monitor refers to the secret with the token."""
    shown = {"credentials": {"name": "s", "key": "token"}}
    monitor = {"serviceMonitor": {"enabled": True, "authorization": shown}}
    rendered = _rendered(tmp_path, {"config": {"auth": {"metrics": True}}, "metrics": monitor})
    assert [endpoint["authorization"] for endpoint in rendered["ServiceMonitor"]["spec"]["endpoints"]] == [shown]


@needs_tools
@pytest.mark.parametrize(
    "config",
    [
        {"tracing": {"endpoint": "http://10.0.0.9:4317"}},
        {"tiers": [{"type": "lmdb"}, {"type": "valkey", "options": {"url": "valkey://cache"}}, {"type": "disk"}]},
        {"tiers": [{"type": "s3", "options": {"url": "s3://bucket/kv"}}]},
        {"peers": {"servers": ["kvtier:7450"]}},
    ],
    ids=["tracing", "valkey", "s3", "peers"],
)
def test_egress_is_open_only_for_tracing_stores_and_other_servers(tmp_path: Path, config: dict[str, Any]) -> None:
    for closed in ({}, {"tiers": [{"type": "lmdb"}, {"type": "disk"}]}):
        assert _rendered(tmp_path, {"config": closed})["NetworkPolicy"]["spec"]["egress"] == []
    opened = _rendered(tmp_path, {"config": config})
    assert opened["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress"]
    assert "egress" not in opened["NetworkPolicy"]["spec"]


@needs_tools
def test_servers_may_connect_to_each_other_if_they_are_peers(tmp_path: Path) -> None:
    """The name of the headless service stands for all servers of the chart."""
    values = {"config": {"peers": {"servers": ["kvtier:7450"]}}, "tcp": {"enabled": True, "insecure": True}}
    rendered = _rendered(tmp_path, values)
    policy = rendered["NetworkPolicy"]["spec"]
    own = {"from": [{"podSelector": policy["podSelector"]}]}
    assert own in policy["ingress"]
    assert rendered["Service"]["spec"]["clusterIP"] == "None"
    values["config"] = {}
    assert own not in _rendered(tmp_path, values)["NetworkPolicy"]["spec"]["ingress"]


@needs_tools
def test_the_policy_admits_readers_of_events(tmp_path: Path) -> None:
    """Only the pods of `eventsFrom`, and only to the ports of the publisher."""
    router = {"podSelector": {"matchLabels": {"app": "router"}}}
    values: dict[str, Any] = {
        "config": {"events": {"publish": "tcp://0.0.0.0:5557", "replay": "tcp://[::]:5558"}},
        "networkPolicy": {"eventsFrom": [router]},
    }
    rendered = _rendered(tmp_path, values)
    rule = {"ports": [{"port": 5557}, {"port": 5558}], "from": [router]}
    assert rule in rendered["NetworkPolicy"]["spec"]["ingress"]
    _validate(tmp_path, [rendered["NetworkPolicy"]], "1.35.0")
    del values["config"]["events"]["replay"]
    rule["ports"] = [{"port": 5557}]
    assert rule in _rendered(tmp_path, values)["NetworkPolicy"]["spec"]["ingress"]
    only_metrics = _rendered(tmp_path, {})["NetworkPolicy"]["spec"]["ingress"]
    for without in ({"networkPolicy": {}}, {"config": {}}, {"config": {"events": {"publish": "ipc:///run/kvtier/e"}}}):
        assert _rendered(tmp_path, values | without)["NetworkPolicy"]["spec"]["ingress"] == only_metrics


def test_chart_and_package_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[OwnNamespace]:
    """A namespace with a read-only root, like the container's."""
    if reason := unavailable_reason():
        pytest.skip(f"no namespaces here: {reason}")
    boot = "mkdir -p /run/kvtier /var/lib/kvtier /etc/kvtier && touch /run/booted && exec sleep infinity"
    with OwnNamespace(tmp_path / "boot.log", boot) as place:
        yield place


@needs_tools
def test_rendered_container_starts_and_stops(node: OwnNamespace, tmp_path: Path) -> None:
    """Runs both containers with their commands, users, capabilities and file systems."""
    values = {
        "config": {"tiers": [{"type": "lmdb", "size": "64MiB"}]},
        "regionSize": "64Mi",
        "metrics": {"port": 19464},
    }
    rendered = _rendered(tmp_path, values)
    config = tmp_path / "kvtier.toml"
    config.write_text(rendered["ConfigMap"]["data"]["kvtier.toml"])
    assert node.run("cp", str(config), "/etc/kvtier/kvtier.toml").returncode == 0
    for mount in ("/run/kvtier", "/var/lib/kvtier"):
        assert node.run("mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", mount).returncode == 0
    assert node.run("mount", "-o", "remount,bind,ro", "/").returncode == 0
    pod = rendered["DaemonSet"]["spec"]["template"]["spec"]
    init = node.run(*_container(pod, pod["initContainers"][0]))
    assert init.returncode == 0, init.stderr
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            node.command(*_container(pod, pod["containers"][0])), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        _wait_probe(node, pod["containers"][0], tmp_path / "log")
        user = str(pod["securityContext"]["runAsUser"])
        engine = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "/opt/kvtier/bin/python"]
        done = node.run(*engine, "/opt/source/tests/harness/round_trip.py")
        assert done.returncode == 0, done.stdout + done.stderr
        assert node.run("pkill", "-TERM", "-u", user, "-o").returncode == 0
        assert server.wait(pod["terminationGracePeriodSeconds"]) == 0
    finally:
        server.kill()
        server.wait()


def _container(pod: dict[str, Any], container: dict[str, Any]) -> list[str]:
    """Returns the command that starts a container as a runtime does; the namespace is its image."""
    context = pod["securityContext"] | container["securityContext"]
    added = [f"+{name.lower()}" for name in context["capabilities"].get("add", [])]
    capabilities = ",".join(["-all", *added])
    user = str(context["runAsUser"])
    environment = [f"{entry['name']}={entry['value']}" for entry in container["env"]]
    return [
        *("setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs"),
        *("--inh-caps", capabilities, "--bounding-set", capabilities),
        *("env", "-i", "PATH=/opt/kvtier/bin:/usr/bin:/bin", *environment),
        *container["command"],
        *container["args"],
    ]


def _wait_probe(node: OwnNamespace, container: dict[str, Any], log: Path) -> None:
    probe = container["startupProbe"]["httpGet"]
    [port] = [port["containerPort"] for port in container["ports"] if port["name"] == probe["port"]]
    url = f"http://127.0.0.1:{port}{probe['path']}"
    wait_until(lambda: node.run("curl", "-sf", url).stdout.strip() == "ok", otherwise=log.read_text, interval=0.1)


def _validate(directory: Path, documents: list[dict[str, Any]], version: str) -> None:
    files = []
    for number, document in enumerate(documents):
        files.append(directory / f"{number}.yaml")
        files[-1].write_text(json.dumps(document))
    done = subprocess.run(
        [TOOLS / "kubernetes-validate", "--strict", "--kubernetes-version", version, *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == len(files), done.stdout
