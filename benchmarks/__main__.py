# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks``: one command for each benchmark, with the options of its request."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from benchmarks.gpu.request import GpuRequest
from benchmarks.layouts.request import LayoutsRequest
from benchmarks.local_steps.elastic_request import ElasticRequest
from benchmarks.local_steps.loss_request import LossRequest
from benchmarks.local_steps.request import LocalStepsRequest
from benchmarks.losses.request import LossesRequest
from benchmarks.pipeline.request import PipelineRequest
from benchmarks.planner.request import PlannerRequest
from benchmarks.request import Request
from benchmarks.sparse.request import SparseRequest
from benchmarks.wave.request import WaveRequest
from wavemare.cli.options import check_picture, option, save
from wavemare.errors import ConfigError
from wavemare.failure import run_main
from wavemare.files import check_writable

PROGRAM = ("python", "-m", "benchmarks")

app = typer.Typer(
    name="benchmarks",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure systems side by side, in one run.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _command(kind: type[Request]) -> Callable[..., None]:
    """Return the command of a benchmark; its parameters are the fields of the request."""

    def run(json_file: Path | None, plot: Path | None, **given: Any) -> None:
        values = {name: _read(kind, name, value) for name, value in given.items()}
        request = kind.of(**values)
        check_writable("--json", json_file)
        check_picture("--plot", plot)
        for name, value in values.items():
            if isinstance(value, Path):
                check_writable(option(name), value, is_folder=True)
        # The ranks end with this process.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        result = request.run()
        from benchmarks.result import print_result

        save(json_file, PROGRAM, result)
        print_result(request, result)
        if plot is not None:
            request.draw(result, plot)

    # Options of this benchmark alone come first.
    names = sorted(kind.model_fields, key=lambda name: _owner(kind, name) is not kind)
    parameters = [_parameter(kind, name) for name in names]
    parameters += [
        _keyword("json_file", None, Path | None, "--json", help="Write the result to this file."),
        _keyword("plot", None, Path | None, "--plot", help="Draw the ratios into this file."),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = kind.__doc__
    return run


def _owner(kind: type[Request], name: str) -> type[Request]:
    """Return the class that introduces a field."""
    return [c for c in kind.__mro__ if issubclass(c, Request) and name in c.model_fields][-1]


def _parameter(kind: type[Request], name: str) -> inspect.Parameter:
    """Return the option of a field; a tuple is written with commas."""
    field, owner = kind.model_fields[name], _owner(kind, name)
    found, item = _types(field.annotation)
    default = field.default
    if item is not None:
        found, default = str, None if default is None else ",".join(map(str, default))
    return _keyword(
        name,
        default,
        found if default is not None else found | None,
        *([option(name)] if found is bool else []),
        help=" ".join(str(field.description or owner.model_fields[name].description).split()),
        rich_help_panel=owner.__dict__.get("panel"),
    )


def _keyword(
    name: str, default: Any, annotation: Any, *words: str, **described: Any
) -> inspect.Parameter:
    annotation = Annotated[annotation, typer.Option(*words, **described)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _types(annotation: Any) -> tuple[Any, Any]:
    """Return the type of a field, and of a tuple's items or None."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return tuple, _types(get_args(annotation)[0])[0]
    if get_origin(annotation) is Literal:
        return str, None
    if get_args(annotation):  # X | None
        return _types(next(each for each in get_args(annotation) if each is not NoneType))
    return annotation, None


def _read(kind: type[Request], name: str, value: Any) -> Any:
    """Return the value of an option for the request: words between commas as a tuple."""
    _, item = _types(kind.model_fields[name].annotation)
    if item is None or value is None:
        return value
    words = dict.fromkeys(word.strip() for word in value.split(",") if word.strip())
    try:
        return tuple(dict.fromkeys(map(item, words)))
    except ValueError:
        reason = "these are no numbers between commas"
        example = "1,2,4,8" if item is int else "1,0.1,0.01"
        raise ConfigError(option(name), value, reason, f"Write them as in {example}") from None


for _name, _kind in (
    ("pipeline", PipelineRequest),
    ("losses", LossesRequest),
    ("sparse", SparseRequest),
    ("wave", WaveRequest),
    ("planner", PlannerRequest),
    ("layouts", LayoutsRequest),
    ("local-steps", LocalStepsRequest),
    ("local-steps-loss", LossRequest),
    ("elastic", ElasticRequest),
    ("gpu", GpuRequest),
):
    app.command(_name)(_command(_kind))


def main() -> None:
    """Run the command line; a `WavemareError` becomes one message and an exit code."""
    run_main(lambda: app(prog_name=" ".join(PROGRAM)))


if __name__ == "__main__":
    main()
