# SPDX-License-Identifier: Apache-2.0
"""What is released: source archive and wheel, used where the checkout is not.

The environment is empty but for links to what wavemare depends on, in place of what an installation
from a package index would have brought.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

import wavemare

ROOT = Path(__file__).resolve().parents[2]
AREAS = ("engine", "pipeline", "comm", "recipes")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")


def run(*words, cwd):
    """Run a command that knows nothing of the checkout; return its standard output."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ended = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a source archive and the wheel that is built from it, not from the checkout."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("framework", *AREAS):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    for file in FILES:
        shutil.copy(ROOT / file, source / file)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=source)
    (archive,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Return the folder of commands of an environment that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "wavemare" not in entry.name and entry.name != "__pycache__":
            (site / entry.name).symlink_to(entry)
    theirs = Path(sys.executable).parent
    for library in (theirs.parent / "lib").glob("lib*"):
        (folder / "lib" / library.name).symlink_to(library)
    for program in ("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"):
        if (theirs / program).exists():
            (folder / "bin" / program).symlink_to(theirs / program)
    launcher = (theirs / "deepspeed").read_text().split("\n", maxsplit=1)[1]
    (folder / "bin" / "deepspeed").write_text(f"#!{folder}/bin/python\n{launcher}")
    (folder / "bin" / "deepspeed").chmod(0o755)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--no-index", "--no-deps", built[1], cwd=folder)
    return folder / "bin"


def packaged_files():
    """Return what a wheel must hold: sources and data of the package and the four areas."""
    package = ROOT / "framework" / "wavemare"
    names = set()
    for base, prefix in ((package, "wavemare"), *((ROOT / a, f"wavemare/{a}") for a in AREAS)):
        for pattern in ("*.py", "*.json", "py.typed"):
            for file in base.rglob(pattern):
                if not (base / file.relative_to(base).parts[0]).is_symlink():
                    names.add(f"{prefix}/{file.relative_to(base).as_posix()}")
    return names


def test_wheel_and_archive_hold_the_tree(built):
    archive, wheel = built
    wanted = packaged_files()
    assert {"wavemare/py.typed", "wavemare/recipes/gpt/pretrain_pipemare.json"} <= wanted
    with zipfile.ZipFile(wheel) as opened:
        (information,) = {name.split("/")[0] for name in opened.namelist() if "dist-info" in name}
        held = {name for name in opened.namelist() if not name.startswith(information)}
        commands = opened.read(f"{information}/entry_points.txt")
        metadata = message_from_string(opened.read(f"{information}/METADATA").decode())
        assert opened.read(f"{information}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert held == wanted
    assert b"wavemare = wavemare.cli:main" in commands
    assert metadata["Version"] == wavemare.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    with tarfile.open(archive) as opened:
        top = f"wavemare-{wavemare.__version__}"
        files = {m.name.removeprefix(f"{top}/") for m in opened.getmembers() if m.isfile()}
        assert all(m.isfile() or m.isdir() for m in opened.getmembers())  # no link leads out of it
    assert {f"framework/{name}" for name in wanted} | set(FILES) <= files


def test_the_version_stands_in_one_place():
    version = wavemare.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "wavemare.__version__"}}
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The wavemare authors"}]


@pytest.mark.world_size(2)
@pytest.mark.timeout(900)
def test_the_wheel_works_where_the_checkout_is_not(installed, command, small_options, tmp_path):
    path = f"{installed}{os.pathsep}{os.environ['PATH']}"

    def ours(program, *words):
        # An empty PYTHONPATH is none.
        environment = {"PATH": path, "PYTHONPATH": ""}
        ended = command(installed / program, *words, environment=environment, timeout=500)
        return ended.check().output

    where = ours("python", "-c", "import wavemare; print(wavemare.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert ours("wavemare", "--version") == f"wavemare {wavemare.__version__}\n"
    assert " train " in ours("wavemare", "--help")
    findings = json.loads(ours("wavemare", "doctor", "--json"))
    rows = {row["check"]: row for row in findings}
    assert rows["wavemare"]["value"] == wavemare.__version__
    assert [row for row in findings if row["status"] == "fail"] == []

    steps = {"max_steps": 2, "eval_interval": 2, "save_interval": 2}
    ours("wavemare", "train", "gpt", *small_options("gpt", tmp_path / "run", **steps))
    left = json.loads((tmp_path / "run" / "config.json").read_text())
    assert left["environment"]["versions"]["wavemare"] == wavemare.__version__
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-000002"
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
