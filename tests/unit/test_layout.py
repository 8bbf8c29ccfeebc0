# SPDX-License-Identifier: Apache-2.0
"""The layout of the repository: who may import whom, and what is importable."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from wavemare.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "framework" / "wavemare"
AREAS = ("engine", "pipeline", "comm", "recipes")
# Imports go downwards only: an area may import areas of a lower level, and itself.
LEVELS = {"recipes": 4, "framework": 3, "engine": 2, "pipeline": 1, "comm": 1, "leaf": 0}
# Libraries that an area is useful without.
FORBIDDEN = {"comm": {"deepspeed", "transformers"}, "pipeline": {"deepspeed", "transformers"}}
BROUGHT_ALONG = {
    "hjson": "deepspeed",
    "packaging": "deepspeed",
    "pandas": "datasets",
    "pyarrow": "datasets",
    "pydantic_core": "pydantic",
    "tokenizers": "transformers",
}
"""Libraries that come with a dependency, which requires them itself."""


def modules():
    """Yield the dotted name below ``wavemare`` and the file of every module."""
    # rglob does not follow symbolic links: the four areas are walked on their own.
    for base, prefix in ((PACKAGE, ()), *((ROOT / area, (area,)) for area in AREAS)):
        for file in sorted(base.rglob("*.py")):
            if any((base / part).is_symlink() for part in file.relative_to(base).parts[:1]):
                continue
            parts = [*prefix, *file.relative_to(base).with_suffix("").parts]
            yield ".".join(part for part in parts if part != "__init__"), file


MODULES = dict(modules())


@cache
def nodes(file):
    """Return all of a file's syntax, functions' insides too."""
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


@cache
def imports(name):
    """Return line and full name of everything that a module imports, wherever it does so."""
    full = f"wavemare.{name}".rstrip(".")
    package = full if MODULES[name].name == "__init__.py" else full.rpartition(".")[0]
    found = []
    for node in nodes(MODULES[name]):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A leading dot counts upwards from the package of the file.
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            start = [".".join(above)] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{source}.{alias.name}") for alias in node.names]
    return found


def named(name):
    """Yield line and name of our modules that stand in one as text, to be imported later."""
    for node in nodes(MODULES[name]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            package, _, module = node.value.partition(".")
            if package == "wavemare" and module and module in MODULES:
                yield node.lineno, node.value


def leaves():
    """Return the modules beside the areas that know only each other, so that all may use them."""
    found = {name for name, file in MODULES.items() if file.parent == PACKAGE and name}
    ours = {
        name: {word.split(".")[1] for _, word in imports(name) if word.startswith("wavemare.")}
        for name in found
    }
    while guilty := {name for name in found if not ours[name] <= found}:
        found -= guilty
    return found


LEAVES = leaves()


def area(module):
    """Return the area of a module below ``wavemare``."""
    first = module.split(".", maxsplit=1)[0]
    if first in AREAS:
        return first
    return "leaf" if first in LEAVES else "framework"


def upwards(name):
    """Yield what a module imports and must not."""
    file, own = MODULES[name].relative_to(ROOT), area(name)
    # The command line alone starts recipes, by their names.
    later = () if name.startswith("cli.") else named(name)
    for line, imported in (*imports(name), *later):
        parts = imported.split(".")
        if parts[0] == "wavemare" and len(parts) > 1:
            other = area(parts[1])
            if other != own and LEVELS[other] >= LEVELS[own]:
                yield f"{file}:{line} imports {imported}"
            elif parts[1] == "cli" and name.partition(".")[0] not in {"cli", "__main__"}:
                yield f"{file}:{line} imports the command line"
        elif parts[0] in FORBIDDEN.get(own, ()):
            yield f"{file}:{line}: {own} must not know {parts[0]}"
        elif parts[0] in AREAS:
            yield f"{file}:{line}: the bare name of wavemare.{parts[0]}"


def test_imports_go_downwards_only():
    assert {area(name) for name in MODULES} == LEVELS.keys()
    assert [guilty for name in MODULES for guilty in upwards(name)] == []


def test_every_library_that_is_imported_is_declared():
    """By us, as an extra that errors name, or by a dependency that requires it itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    providers = packages_distributions()
    for library, provider in BROUGHT_ALONG.items():
        needed = {canonicalize_name(Requirement(text).name) for text in requires(provider)}
        assert canonicalize_name(library) in needed
    for package, extra in EXTRAS.items():
        assert any(Requirement(t).name == package for t in project["optional-dependencies"][extra])
    # Triton comes with torch's builds for GPUs, and its kernels run nowhere else.
    libraries = {"wavemare", "triton", *BROUGHT_ALONG, *EXTRAS}
    libraries |= sys.stdlib_module_names
    libraries |= {
        library
        for library, names in providers.items()
        if declared & set(map(canonicalize_name, names))
    }
    guilty = [
        f"{MODULES[name].relative_to(ROOT)}:{line} imports {imported}"
        for name in MODULES
        for line, imported in imports(name)
        if imported.split(".")[0] not in libraries
    ]
    assert guilty == []


def python(program, cwd):
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", AREAS)
def test_bare_import_is_refused(name):
    result = python(f"import {name}", ROOT)
    assert result.returncode != 0
    message = f"ImportError: '{name}' is part of wavemare: import 'wavemare.{name}' instead\n"
    assert result.stderr.endswith(message)


def test_the_package_and_its_leaves_import_nothing_heavy(tmp_path):
    names = ["wavemare", *(f"wavemare.{name}" for name in sorted(LEAVES))]
    program = (
        "import sys\n"
        f"import {', '.join(names)}\n"
        "print(sorted({'torch', 'deepspeed', 'transformers', 'numpy'} & sys.modules.keys()))\n"
    )
    assert python(program, tmp_path).stdout == "[]\n"
