"""The example for Kubernetes: valid by its schemas, and its sizes go together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvoffload._sizes import parse_size

validator = pytest.importorskip("kubernetes_validate", reason="it needs the kubernetes extra")
yaml = pytest.importorskip("yaml", reason="it needs the kubernetes extra")

pytestmark = pytest.mark.thorough

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
RELEASES = ("1.30", "1.37")

if not FOLDER.is_dir():
    pytest.skip("the examples are not beside the tests", allow_module_level=True)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def quantity(text: str) -> int:
    """Return a quantity of Kubernetes in bytes."""
    return parse_size(f"{text}B")


@pytest.fixture(scope="module")
def engine() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in documents("vllm.yaml")}


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_api_server_takes_is_valid(engine, release) -> None:
    assert set(engine) == {"ConfigMap", "Service", "StatefulSet"}
    for one in engine.values():
        validator.validate(one, release, strict=True)
    broken = json.loads(json.dumps(engine["StatefulSet"]))
    broken["spec"]["replica"] = 2
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, release, strict=True)


@pytest.mark.parametrize("release", RELEASES)
def test_the_pods_of_the_chart_are_valid(release) -> None:
    """A pod made of the values, as the chart passes them on."""
    (values,) = documents("modelservice-values.yaml")
    container = dict(values["decode"]["containers"][0])
    assert container.pop("modelCommand") == "vllmServe"
    assert container.pop("mountModelVolume") is True
    spec = {"containers": [container], "volumes": values["decode"]["volumes"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "decode"}, "spec": spec}
    validator.validate(pod, release, strict=True)


def test_configurations_are_one_and_sizes_go_together(engine) -> None:
    mapped = json.loads(engine["ConfigMap"]["data"]["kv-transfer.json"])
    pod = engine["StatefulSet"]["spec"]["template"]["spec"]
    (claim,) = engine["StatefulSet"]["spec"]["volumeClaimTemplates"]
    (values,) = documents("modelservice-values.yaml")
    decode = values["decode"]
    (container,) = decode["containers"]
    assert json.loads(container["args"][1]) == mapped
    shared, slab = decode["volumes"]
    claims = claim["spec"], slab["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claims[0] == claims[1]
    assert pod["volumes"] == [shared]

    extra = mapped["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    in_shm = quantity(shared["emptyDir"]["sizeLimit"])
    assert extra["cpu_bytes_to_use"] < in_shm
    assert 1.09 * parse_size(tier["capacity_bytes"]) < quantity(
        claims[0]["resources"]["requests"]["storage"]
    )
    for one in (container, pod["containers"][0]):
        assert in_shm < quantity(one["resources"]["limits"]["memory"])
        mounts = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
        assert mounts == {"shm": "/dev/shm", "kv": tier["path"]}
        assert {"PYTHONHASHSEED", "KVOFFLOAD_PURE_PYTHON"} <= {env["name"] for env in one["env"]}


def test_prometheus_finds_the_engines_and_grafana_the_dashboard(engine) -> None:
    (monitor,) = documents("monitoring.yaml")
    service, pod = engine["Service"], engine["StatefulSet"]["spec"]["template"]
    labels = monitor["spec"]["selector"]["matchLabels"]
    assert labels == service["metadata"]["labels"] == service["spec"]["selector"]
    assert labels == pod["metadata"]["labels"]
    (endpoint,), (port,) = monitor["spec"]["endpoints"], service["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    (kustomization,) = documents("kustomization.yaml")
    assert kustomization["resources"] == ["vllm.yaml", "monitoring.yaml"]
    (generated,) = kustomization["configMapGenerator"]
    text = (FOLDER / "kustomization.yaml").read_text(encoding="utf-8")
    (file,) = generated["files"]
    assert re.search(rf"kvoffload dashboard grafana > .*/{file}$", text, re.MULTILINE)
