# SPDX-License-Identifier: Apache-2.0
"""What is released: source archive and wheel, used where the checkout is not."""

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
from pathlib import Path

import pytest
import yaml

import wavemare

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
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
    """Return the folder of commands of an environment that the wheel is installed in.

    Its dependencies are those of the developer's environment.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    python = folder / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-index", "--no-deps", built[1], cwd=folder)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    launcher = (BIN / "deepspeed").read_text().split("\n", maxsplit=1)[1]
    (folder / "bin" / "deepspeed").write_text(f"#!{python}\n{launcher}")
    (folder / "bin" / "deepspeed").chmod(0o755)
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
    assert {"wavemare/py.typed", "wavemare/recipes/gpt/pretrain.json"} <= wanted
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
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The wavemare authors"}]


# Triton comes with torch for CUDA alone, and is imported with the first tensor there; torchft is an
# extra, which one module needs.
IMPORT_ALL = """
import sys
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages
import wavemare
def fail(name):
    raise
modules = [m.name for m in walk_packages(wavemare.__path__, "wavemare.", fail)]
for name in modules:
    last = name.rpartition(".")[2]
    if not last.startswith(("__main__", "triton_")) and (last != "quorum" or find_spec("torchft")):
        import_module(name)
assert not {"engine", "pipeline", "comm", "recipes"} & sys.modules.keys()
print(len(modules), "modules")
"""


def test_every_module_is_importable_by_its_full_name(launch, tmp_path):
    program = tmp_path / "import_all.py"
    program.write_text(IMPORT_ALL)
    ended = launch(program, ranks=1, own=True).check()
    assert f"{number_of_modules()} modules" in ended.outputs[0].splitlines()


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.timeout(1800)
def test_the_wheel_works_where_the_checkout_is_not(installed, command, small_options, tmp_path):
    path = os.pathsep.join([str(installed), str(BIN), os.environ["PATH"]])

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
