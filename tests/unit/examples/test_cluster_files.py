"""The files of `examples/cluster`: the fields of their kinds, and what they share with each other and with gerl."""

import json
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import jsonschema
import yaml
from dry_run import ROOT, TRAIN
from ray.runtime_env import RuntimeEnv

from gerl.commandline.composition import Composed, compose_run

FOLDER = ROOT / "examples" / "cluster"
VERSIONS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
RAYJOB: dict[str, Any] = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
SKYPILOT: dict[str, Any] = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())

# --- Docker


def instructions(text: str) -> dict[str, list[str]]:
    """The arguments of a Dockerfile's instructions, by name, in order."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    found: dict[str, list[str]] = {}
    for name, _, rest in (line.partition(" ") for line in lines if line.strip()):
        found.setdefault(name, []).append(rest.strip())
    return found


DOCKER = instructions((FOLDER / "Dockerfile").read_text())
COPIED = [source for rest in DOCKER["COPY"] for source in rest.split()[:-1]]


def test_the_dockerfile_installs_the_project_with_pinned_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [base] = DOCKER["FROM"]
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-\w+-ubuntu\d\d\.04", base)
    pip = [shlex.split(rest) for rest in DOCKER["RUN"] if "pip install" in rest]
    (extra,) = re.findall(r"^\.\[(\w+)\]$", pip[0][-1])
    assert len(pip) == 1 and pip[0][pip[0].index("-c") + 1] == "constraints.txt" in COPIED
    packages = project["project"]["optional-dependencies"][extra]
    assert any(package.startswith("ray[default]") for package in packages), "jobs and KubeRay need its dashboard"
    # what the wheel is built of
    needed = {part["path"] for part in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]}
    needed |= {*project["project"]["license-files"], "pyproject.toml"}
    needed |= {path.strip("/") for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["include"]}
    assert needed <= set(COPIED)


def test_what_the_dockerfile_copies_is_there_and_sent_to_the_builder() -> None:
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    for source in COPIED:
        assert (ROOT / source).exists() and f"!{source}" in ignored


def test_the_image_runs_gerl_as_a_user() -> None:
    command = json.loads(DOCKER["CMD"][0])
    assert command == [*TRAIN, "--help"] and DOCKER["USER"][-1].isdigit() and DOCKER["USER"][-1] != "0"
    assert f"--uid {DOCKER['USER'][-1]}" in " ".join(DOCKER["RUN"])
    shown = re.search(r"^#\s+(python -m gerl.*)$", (FOLDER / "Dockerfile").read_text(), re.M)
    assert shown is not None and compose_run(shlex.split(shown[1])[3:])


# --- KubeRay

TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}


def block(required: Sequence[str] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "additionalProperties": False, "required": list(required)}


def some(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}  # what Ray is given: numbers are texts, too
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+([KMGT]i|m)?$"}}
CONTAINER = block(
    ("name", "image"),
    name=TEXT,
    image=TEXT,
    resources=block(requests=QUANTITIES, limits=QUANTITIES),
    volumeMounts=some(block(("name", "mountPath"), name=TEXT, mountPath=TEXT)),
)
POD = block(
    ("containers",),
    securityContext=block(runAsNonRoot={"type": "boolean"}, runAsUser=COUNT, fsGroup=COUNT),
    containers=some(CONTAINER),
    volumes=some(block(("name",), name=TEXT, persistentVolumeClaim=block(("claimName",), claimName=TEXT))),
)
POD_TEMPLATE = block(("spec",), spec=POD)
CLUSTER = block(
    ("headGroupSpec",),
    rayVersion=TEXT,
    authOptions=block(mode={"enum": ["disabled", "token"]}),
    headGroupSpec=block(("template",), rayStartParams=TEXTS, template=POD_TEMPLATE),
    workerGroupSpecs=some(
        block(
            ("groupName", "template", "maxReplicas", "minReplicas"),
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=TEXTS,
            template=POD_TEMPLATE,
        )
    ),
)
# the fields of ray.io/v1 that the manifest uses; a misspelt one would be ignored by the cluster
RAYJOB_SCHEMA = block(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=block(("name",), name={"type": "string", "pattern": "^[a-z0-9-]{1,40}$"}),
    spec=block(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=TEXT,
        runtimeEnvYAML=TEXT,
        backoffLimit=COUNT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=CLUSTER,
    ),
)


def test_the_rayjob_has_the_fields_of_its_kind() -> None:
    jsonschema.validate(RAYJOB, RAYJOB_SCHEMA)


def test_the_rayjob_trains_on_the_gpus_of_its_workers() -> None:
    cluster = RAYJOB["spec"]["rayClusterSpec"]
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert cluster["rayVersion"] == VERSIONS["ray"] and cluster["authOptions"] == {"mode": "token"}
    assert head["rayStartParams"]["num-gpus"] == "0" and workers["replicas"] == workers["maxReplicas"]
    [first], [worker] = (group["template"]["spec"]["containers"] for group in (head, workers))
    assert first["image"] == worker["image"] and "nvidia.com/gpu" not in first["resources"]["limits"]
    composed, config = entrypoint(), entrypoint().config.cluster
    assert config.num_workers == workers["replicas"] * int(worker["resources"]["limits"]["nvidia.com/gpu"])
    assert config.patience > 60, "a pod takes longer than that to be started anew"
    assert composed.config.checkpoint.resume == "auto" and RAYJOB["spec"]["backoffLimit"] > 0


def entrypoint() -> Composed:
    command = shlex.split(RAYJOB["spec"]["entrypoint"])
    assert command[:3] == TRAIN
    return compose_run(command[3:])


def test_what_the_rayjob_reads_and_writes_lies_on_its_volume() -> None:
    paths = [PurePosixPath(path) for path in re.findall(r"=(/\S+)", RAYJOB["spec"]["entrypoint"])]
    assert len(paths) >= 4  # the model, both prompt files and the run
    cluster = RAYJOB["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = pod["containers"][0]["volumeMounts"]
        assert {mount["name"] for mount in mounts} <= volumes
        assert all(any(path.is_relative_to(mount["mountPath"]) for mount in mounts) for path in paths)
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(DOCKER["USER"][-1])


def test_the_runtime_environment_of_the_rayjob() -> None:
    given = RuntimeEnv(**yaml.safe_load(RAYJOB["spec"]["runtimeEnvYAML"]))
    assert int(given["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 3


# --- SkyPilot

VALUES = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
SKYPILOT_SCHEMA = block(
    ("num_nodes", "run"),
    name={"type": "string", "pattern": "^[a-z][a-z0-9-]*$"},
    workdir=TEXT,
    num_nodes={"type": "integer", "minimum": 1},
    resources=block(
        accelerators={"type": "string", "pattern": r"^\w+:\d+$"},
        disk_size=COUNT,
        job_recovery=block(max_restarts_on_errors=COUNT),
    ),
    volumes={"type": "object", "additionalProperties": TEXT},
    secrets=VALUES,
    envs=VALUES,
    setup=TEXT,
    run=TEXT,
)


def test_the_skypilot_task_has_the_fields_of_its_kind() -> None:
    jsonschema.validate(SKYPILOT, SKYPILOT_SCHEMA)
    assert SKYPILOT["secrets"]["RAY_AUTH_TOKEN"] is None, "a token does not belong into a file"


# --- docs/cluster.md


def test_what_the_page_says_that_a_run_says_is_said() -> None:
    _, _, table = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8").partition("| the run says |")
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "gerl").rglob("*.py")))
    for said in re.findall(r"`(.+?)`", " ".join(rows)):
        ours = re.sub(r"\(Connection refused\)|\(Failed to connect.*\)", "", said)  # in brackets: Ray's reason
        assert all(part.strip() in source for part in ours.split("...")), said
    assert len(rows) >= 8


def test_the_page_names_every_file() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    helpers = {"Dockerfile.dockerignore", "wait_for_nodes.py"}
    assert not [path.name for path in FOLDER.iterdir() if path.name not in page and path.name not in helpers]
