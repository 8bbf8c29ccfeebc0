# SPDX-License-Identifier: Apache-2.0
"""What only some features need: packages, each of an extra of wavemare, and a compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from wavemare.errors import LaunchError

EXTRAS = {
    "bitsandbytes": "bnb",
    "matplotlib": "report",
    "numba": "sparse",
    "peft": "peft",
    "plotly": "report",
    "torchao": "torchao",
    "torchft": "torchft",
}
"""The extra that brings a package."""

# What builds code as a program runs: the variable that names its compiler, and those it looks for.
_BUILDERS = {
    "torch.utils.cpp_extension": ("CXX", ("c++",)),
    "torch._inductor.cpp_builder": ("CXX", ("g++",)),
    "triton.runtime.build": ("CC", ("gcc", "clang")),
}


def is_installed(package: str) -> bool:
    """Whether a package of `EXTRAS` can be imported."""
    return find_spec(package) is not None


def require(package: str, feature: str) -> None:
    """Check that the package of a feature is installed.

    Args:
        package: One of `EXTRAS`.
        feature: What needs it, in words that begin a sentence.

    Raises:
        LaunchError: It is not installed; the remedy names the extra.
    """
    if not is_installed(package):
        remedy = f"Install it: pip install 'wavemare[{EXTRAS[package]}]'"
        raise LaunchError(package, None, f"{feature} needs it, and it is not installed", remedy)


@contextmanager
def naming_compiler() -> Iterator[None]:
    """Say it in one sentence if code that is built inside has no compiler.

    Raises:
        LaunchError: A build has failed without one.
    """
    try:
        yield
    except Exception as error:
        if (missing := missing_compiler(error)) is not None:
            raise missing from error
        raise


def missing_compiler(error: BaseException) -> LaunchError | None:
    """Return what to say of an error by which a build has failed without a compiler, else None."""
    modules: set[object] = set()
    chain: BaseException | None = error
    while chain is not None:
        frames = traceback.walk_tb(chain.__traceback__)
        modules |= {frame.f_globals.get("__name__") for frame, _ in frames}
        chain = chain.__cause__ or chain.__context__
    for builder in _BUILDERS.keys() & modules:
        variable, names = _BUILDERS[str(builder)]
        given = shlex.split(os.environ.get(variable, ""))[:1]
        if not any(map(shutil.which, given or names)):
            reason = f"{builder} builds code at its first use, and finds no compiler"
            remedy = f"Install one (apt install g++), or name it: export {variable}=..."
            if "inductor" in str(builder):
                remedy += "; or compile nothing: export TORCHDYNAMO_DISABLE=1"
            return LaunchError(variable, os.environ.get(variable), reason, remedy)
    return None
