"""The recipes of configs/ are what Ray, KubeRay and shells accept; what is misspelt is refused."""

import ast
import copy
import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrpc.config import Settings

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
SCHEMA = ROOT / "tests" / "recipes" / "kuberay.schema.json"
RECIPES = sorted(path for path in CONFIGS.rglob("*") if path.is_file() and path.parent != CONFIGS)
CLOUDS = sorted(CONFIGS.glob("clouds/*.yaml"))
MANIFESTS = sorted(CONFIGS.glob("kuberay/*.yaml"))
SCRIPTS = sorted(CONFIGS.rglob("*.sh"))
DOCKERFILE = CONFIGS / "docker" / "Dockerfile"
LINT_SECONDS = 60.0


def identify(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def load_cloud(path: Path) -> dict[str, Any]:
    config = yaml.safe_load(path.read_text())
    assert isinstance(config, dict)
    return config


def load_manifests(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def test_every_recipe_is_in_the_documents():
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert not [path for path in RECIPES if str(path.relative_to(ROOT)) not in page]


def test_no_line_of_a_recipe_is_too_long():
    assert not [
        f"{identify(path)}: {line}"
        for path in RECIPES
        for line in path.read_text().splitlines()
        if len(line) > 100
    ]


def test_recipes_have_one_version_of_ray():
    version = re.compile(r"(?:ray\[default\]==|rayproject/ray:|rayVersion: )([\d.]+)")
    found = {each for path in RECIPES for each in version.findall(path.read_text())}
    assert len(found) == 1


# -- ray up


@pytest.mark.parametrize("path", CLOUDS, ids=identify)
def test_ray_up_accepts_the_file(path):
    """By Ray's own checks, with the provider's defaults filled in; they need no cloud."""
    util = pytest.importorskip("ray.autoscaler._private.util")
    prepared = util.prepare_config(load_cloud(path))
    util.validate_config(prepared)
    workers = prepared["available_node_types"]["worker"]
    assert 0 < workers["min_workers"] <= workers["max_workers"] <= prepared["max_workers"]


@pytest.mark.parametrize("path", CLOUDS, ids=identify)
@pytest.mark.parametrize("where", ["top", "auth", "node type"])
def test_ray_up_refuses_a_misspelt_key(path, where):
    jsonschema = pytest.importorskip("jsonschema")
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = load_cloud(path)
    places = {"top": config, "auth": config["auth"]}
    places["node type"] = config["available_node_types"]["worker"]
    places[where]["max_workrs"] = 1
    with pytest.raises(jsonschema.ValidationError, match="max_workrs"):
        util.validate_config(util.prepare_config(config))


@pytest.mark.parametrize("path", CLOUDS, ids=identify)
def test_nodes_of_a_cloud_require_the_token(path):
    config = load_cloud(path)
    home = f"/home/{config['auth']['ssh_user']}"
    assert config["file_mounts"] == {f"{home}/.ray/auth_token": "~/.ray/auth_token"}
    assert any("RAY_AUTH_MODE=token" in command for command in config["setup_commands"])
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert not [command for command in starts if "--dashboard-host" in command]


def test_clouds_differ_in_what_is_the_provider_s_alone():
    """What one of them is corrected in, the other is, too."""
    own = ("provider", "available_node_types", "head_setup_commands")
    kept = [{k: v for k, v in load_cloud(path).items() if k not in own} for path in CLOUDS]
    assert len(kept) == 2 and kept[0] == kept[1]


# -- KubeRay


def complaints(manifest: dict[str, Any]) -> list[str]:
    """Return what the schema says against a manifest of KubeRay's."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    del schema["oneOf"]
    checked = jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{manifest['kind']}"})
    return [f"{error.json_path}: {error.message}" for error in checked.iter_errors(manifest)]


def of_kuberay(path: Path) -> dict[str, Any]:
    (found,) = (each for each in load_manifests(path) if each["apiVersion"] == "ray.io/v1")
    return found


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]
    return spec.get("rayClusterSpec", spec)


def test_the_schema_is_one():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    named = set(re.findall(r'"#/\$defs/(\w+)"', SCHEMA.read_text()))
    assert named == set(schema["$defs"])


@pytest.mark.parametrize("path", MANIFESTS, ids=identify)
def test_kuberay_knows_every_field(path):
    assert complaints(of_kuberay(path)) == []


@pytest.mark.parametrize("path", MANIFESTS, ids=identify)
@pytest.mark.parametrize("place", ["manifest", "spec", "auth", "head", "group", "container"])
def test_kuberay_refuses_a_misspelt_field(path, place):
    manifest = copy.deepcopy(of_kuberay(path))
    cluster = cluster_of(manifest)
    places = {
        "manifest": manifest,
        "spec": manifest["spec"],
        "auth": cluster["authOptions"],
        "head": cluster["headGroupSpec"],
        "group": cluster["workerGroupSpecs"][0],
        "container": cluster["headGroupSpec"]["template"]["spec"]["containers"][0],
    }
    places[place]["maxReplica"] = 1
    (complaint,) = complaints(manifest)
    assert "'maxReplica' was unexpected" in complaint


@pytest.mark.parametrize("path", MANIFESTS, ids=identify)
def test_kuberay_refuses_a_wrong_type_and_a_missing_field(path):
    manifest = copy.deepcopy(of_kuberay(path))
    cluster = cluster_of(manifest)
    cluster["workerGroupSpecs"][0]["replicas"] = "two"
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    container["resources"]["limits"]["cpu"] = "2 cores"
    del cluster["workerGroupSpecs"][0]["groupName"]
    assert len(complaints(manifest)) == 3


@pytest.mark.parametrize("path", MANIFESTS, ids=identify)
def test_head_and_workers_on_kubernetes_have_one_image_and_require_the_token(path):
    cluster = cluster_of(of_kuberay(path))
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {
        container["image"]
        for group in groups
        for container in group["template"]["spec"]["containers"]
    }
    assert len(images) == 1
    assert cluster["authOptions"] == {"mode": "token"}
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_program_of_the_job_is_mounted_where_it_is_run():
    job, config = load_manifests(CONFIGS / "kuberay" / "rayjob.yaml")
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    (volume,) = pod["volumes"]
    assert volume["name"] == mount["name"]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    (name,) = config["data"]
    assert job["spec"]["entrypoint"] == f"rayrpc run {mount['mountPath']}/{name}"
    ast.parse(config["data"][name])


# -- jobs


def test_a_job_s_environment_is_one_of_ray_s():
    runtime_env = pytest.importorskip("ray.runtime_env")
    given = [
        yaml.safe_load((CONFIGS / "jobs" / "runtime_env.yaml").read_text()),
        yaml.safe_load(of_kuberay(CONFIGS / "kuberay" / "rayjob.yaml")["spec"]["runtimeEnvYAML"]),
    ]
    for fields in given:
        assert set(fields) <= runtime_env.RuntimeEnv.known_fields
        runtime_env.RuntimeEnv(**fields)


def test_settings_in_recipes_are_rayrpc_s():
    keys = {field.name for field in dataclasses.fields(Settings)}
    texts = [path.read_text() for path in RECIPES]
    named = {name.lower() for text in texts for name in re.findall(r"\bRAYRPC_(\w+)", text)}
    named |= {name for text in texts for name in re.findall(r"--set '?(\w+)=", text)}
    assert named and named <= keys


# -- shell scripts and the image


def lint(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LINT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not shutil.which(program), reason=f"{program} is not installed")


@pytest.mark.process
@pytest.mark.parametrize("path", SCRIPTS, ids=identify)
def test_bash_reads_the_script(path):
    lint("bash", "-n", str(path))


@pytest.mark.process
@needs("shellcheck")
@pytest.mark.parametrize("path", SCRIPTS, ids=identify)
def test_shellcheck_finds_nothing(path):
    lint("shellcheck", str(path))


@pytest.mark.process
@needs("hadolint")
def test_hadolint_finds_nothing():
    lint("hadolint", str(DOCKERFILE))


def test_the_image_has_what_the_recipes_count_on():
    text = DOCKERFILE.read_text()
    assert re.search(r"^ARG RAY_IMAGE=rayproject/ray:[\d.]+-py311$", text, re.MULTILINE)
    assert re.search(r"^USER (?!0\b|root\b)", text, re.MULTILINE)
