# SPDX-License-Identifier: Apache-2.0
"""The layout of the repository: who may import whom, what is importable, how long files are."""

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "framework" / "wavemare"
AREAS = ("engine", "pipeline", "comm", "recipes")
# Imports go downwards only: an area may import areas of a lower level, and itself.
LEVELS = {"recipes": 4, "framework": 3, "engine": 2, "pipeline": 1, "comm": 1, "leaf": 0}
# Modules that know no area, so that all may use them.
LEAVES = {"errors", "section", "files", "json_text", "lazy", "pickled_enums"}
# Libraries that an area is useful without.
FORBIDDEN = {"comm": {"deepspeed", "transformers"}, "pipeline": {"deepspeed", "transformers"}}
# The files of `pipeline` that compute with tensors; all others are plans, and import no torch.
MATHS = {
    "correction",
    "corrections",
    "matrix_optimizer",
    "muon",
    "prediction",
    "replay",
    "soap",
    "storage",
    "update_feedback",
}
LIGHT = {"errors", "files", "json_text", "failure", "lazy"}
# What a reader holds in mind; a comment "# long: REASON" in the first lines allows more.
FILE_LINES, FUNCTION_LINES = 600, 80
REASON = re.compile(r"# long: \w+")
LICENCE = "# SPDX-License-Identifier: Apache-2.0"
SOURCES = sorted(
    [
        *(ROOT / "docs").glob("*.py"),  # what is built lies in folders below
        *(
            file
            for folder in (PACKAGE, *(ROOT / area for area in AREAS), ROOT / "tests")
            for file in folder.rglob("*.py")
            if not any((folder / part).is_symlink() for part in file.relative_to(folder).parts[:1])
        ),
    ]
)
# Libraries that nothing needs to declare: CUDA's wheels of torch bring triton, others do without.
BROUGHT_ALONG = {"triton"}


def modules() -> Iterator[tuple[str, Path]]:
    """Yield the dotted name below ``wavemare`` and the file of every module."""
    # rglob does not follow symbolic links: the four areas are walked on their own.
    for base, prefix in ((PACKAGE, ()), *((ROOT / area, (area,)) for area in AREAS)):
        for file in sorted(base.rglob("*.py")):
            if any((base / part).is_symlink() for part in file.relative_to(base).parts[:1]):
                continue
            parts = [*prefix, *file.relative_to(base).with_suffix("").parts]
            yield ".".join(part for part in parts if part != "__init__"), file


MODULES = dict(modules())


def area(module: str) -> str:
    """Return the area of a module below ``wavemare``."""
    first = module.split(".", maxsplit=1)[0]
    if first in AREAS:
        return first
    return "leaf" if first in LEAVES else "framework"


@cache
def nodes(file: Path) -> list[ast.AST]:
    """Return all of a file's syntax, functions' insides too."""
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def imports(file: Path, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything that a file imports, wherever it does so."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            # A leading dot counts upwards from the package of the file.
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            start = [".".join(above)] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def package_of(name: str, file: Path) -> str:
    full = f"wavemare.{name}".rstrip(".")
    return full if file.name == "__init__.py" else full.rpartition(".")[0]


def test_the_walk_sees_every_area() -> None:
    assert {area(name) for name in MODULES} == LEVELS.keys()


def named(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of our modules that stand in a file as text, to be imported later."""
    for node in nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            package, _, module = node.value.partition(".")
            if package == "wavemare" and module and module in MODULES:
                yield node.lineno, node.value


def upwards(name: str) -> Iterator[str]:
    """Yield what a module imports and must not."""
    file, own = MODULES[name], area(name)
    # The command line alone starts recipes, by their names.
    later = () if name.startswith("cli.") else named(file)
    for line, imported in (*imports(file, package_of(name, file)), *later):
        parts = imported.split(".")
        if parts[0] == "wavemare" and len(parts) > 1:
            other = area(parts[1])
            if other != own and LEVELS[other] >= LEVELS[own]:
                yield f"{file.relative_to(ROOT)}:{line} imports {imported}"
        elif parts[0] in FORBIDDEN.get(own, ()):
            yield f"{file.relative_to(ROOT)}:{line}: {own} must not know {parts[0]}"
        elif parts[0] in AREAS:
            yield f"{file.relative_to(ROOT)}:{line}: the bare name of wavemare.{parts[0]}"


def test_imports_go_downwards_only() -> None:
    assert [guilty for name in MODULES for guilty in upwards(name)] == []


PLANS = [name for name in MODULES if area(name) == "pipeline" and name.split(".")[-1] not in MATHS]


def test_the_files_of_plans_know_no_tensors() -> None:
    assert {f"pipeline.{name}" for name in MATHS} <= MODULES.keys()
    guilty = []
    for name in PLANS:
        file = MODULES[name]
        for line, imported in imports(file, package_of(name, file)):
            first, *rest = imported.split(".")
            ours = first == "wavemare" and rest[0] == "pipeline" and MATHS & set(rest[1:2])
            if ours or first in {"torch", "numpy"}:
                guilty.append(f"{file.relative_to(ROOT)}:{line} imports {imported}")
    assert guilty == []


def undeclared(file: Path, package: str, declared: set[str]) -> Iterator[str]:
    """Yield the libraries that a file imports and no declared distribution has."""
    for line, imported in imports(file, package):
        library = imported.split(".", maxsplit=1)[0]
        if library in sys.stdlib_module_names or library in {"wavemare", *BROUGHT_ALONG}:
            continue
        if not declared & {canonicalize_name(name) for name in providers().get(library, ())}:
            yield f"{file.name}:{line} imports {library}"


@cache
def providers() -> Mapping[str, list[str]]:
    """Return which distributions have a library; reading all metadata takes a while."""
    return packages_distributions()


def test_every_library_that_is_imported_is_declared() -> None:
    """Those too that some other dependency happens to bring, for it may cease to."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    guilty = [
        f"{name}: {found}"
        for name, file in MODULES.items()
        for found in undeclared(file, package_of(name, file), declared)
    ]
    assert guilty == []


def test_undeclared_libraries_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("import os, PIL.Image\ndef f():\n    from yaml import load\nimport triton\n")
    found = list(undeclared(file, "wavemare.comm", {"pillow"}))
    assert found == ["x.py:3 imports yaml"]


def test_relative_imports_are_resolved(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("from ..engine import core\nfrom . import y\nimport torch.nn\n")
    assert list(imports(file, "wavemare.comm")) == [
        (1, "wavemare.engine.core"),
        (2, "wavemare.comm.y"),
        (3, "torch.nn"),
    ]


def test_modules_named_as_text_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("a = 'wavemare.recipes.gpt'\nb = import_module('wavemare.engine')\n'wavemare.'")
    assert list(named(file)) == [(1, "wavemare.recipes.gpt"), (2, "wavemare.engine")]


def test_nothing_imports_the_command_line() -> None:
    guilty = [
        name
        for name, file in MODULES.items()
        if name.split(".")[0] not in {"cli", "__main__"}
        and any(i.startswith("wavemare.cli") for _, i in imports(file, package_of(name, file)))
    ]
    assert guilty == []


def python(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", AREAS)
def test_bare_import_is_refused(name: str) -> None:
    result = python(f"import {name}", ROOT)
    assert result.returncode != 0
    message = f"ImportError: '{name}' is part of wavemare: import 'wavemare.{name}' instead\n"
    assert result.stderr.endswith(message)


def test_every_module_is_importable_by_its_full_name_alone(tmp_path: Path) -> None:
    names = [f"wavemare.{name}".rstrip(".") for name in MODULES if name != "__main__"]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n    importlib.import_module(name)\n"
        f"print(sorted(set({AREAS!r}) & sys.modules.keys()))\n"
    )
    result = python(program, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("[]\n")


def test_leaves_and_the_package_import_nothing_heavy(tmp_path: Path) -> None:
    names = ["wavemare", *(f"wavemare.{name}" for name in sorted(LIGHT))]
    program = (
        "import sys\n"
        f"import {', '.join(names)}\n"
        "print(sorted({'torch', 'deepspeed', 'transformers', 'numpy'} & sys.modules.keys()))\n"
    )
    assert python(program, tmp_path).stdout == "[]\n"


def test_sub_packages_are_found_through_the_links() -> None:
    found = {module.name for module in pkgutil.iter_modules([str(PACKAGE)]) if module.ispkg}
    assert {*AREAS, "observe", "cli"} <= found


def too_long(text: str) -> Iterator[str]:
    """Yield what of a file is longer than a reader holds in mind, without a reason given."""
    lines = text.splitlines()
    if len(lines) > FILE_LINES and not any(map(REASON.search, lines[:3])):
        yield f"{len(lines)} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            length = node.end_lineno - node.lineno + 1
            body = lines[node.lineno - 1 : node.end_lineno]
            if length > FUNCTION_LINES and not any(map(REASON.search, body)):
                yield f"{node.name} of line {node.lineno}: {length} lines"


def test_files_and_functions_are_short_or_say_why_not() -> None:
    guilty = {
        str(file.relative_to(ROOT)): found
        for file in SOURCES
        if (found := list(too_long(file.read_text(encoding="utf-8"))))
    }
    assert guilty == {}


def test_long_files_and_functions_are_seen() -> None:
    body = "    pass\n" * FUNCTION_LINES
    assert list(too_long(f"def f():\n{body[:-9]}")) == []
    assert list(too_long(f"def f():\n{body}")) == [f"f of line 1: {FUNCTION_LINES + 1} lines"]
    assert list(too_long(f"def f():  # long: one case a line\n{body}")) == []
    assert list(too_long("a = 1\n" * (FILE_LINES + 1))) == [f"{FILE_LINES + 1} lines"]
    assert list(too_long("# long: a table\n" + "a = 1\n" * FILE_LINES)) == []


def test_every_source_names_the_licence() -> None:
    others = ["Makefile", "Dockerfile", ".ci/run", "docs/cluster/entrypoint"]
    others += [str(file) for file in (ROOT / "docs" / "cluster").glob("*.sbatch")]
    without = [
        str(file.relative_to(ROOT))
        for file in (*SOURCES, *(ROOT / other for other in others))
        # A script's first line names its interpreter.
        if LICENCE not in file.read_text(encoding="utf-8").splitlines()[:2]
    ]
    assert without == []
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
