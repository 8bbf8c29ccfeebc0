# SPDX-License-Identifier: Apache-2.0
"""Measure the tests' strength: change one place of the product, and see whether a CI test fails.

    python tests/tools/mutants.py sample          # draw 60 mutants of the last commit
    python tests/tools/mutants.py map             # run the CI once, to learn which tests run them
    python tests/tools/mutants.py run --jobs 2    # run those tests on each mutant; goes on if ended
    python tests/tools/mutants.py table           # write docs/results/mutants.md and .json

All but the table works on copies of the last commit in --folder, with the interpreter that starts
it. ``run --only ID,ID --tests FILE`` tries new tests on old mutants.

A mutant is one changed operator, one changed constant, or one statement that ``pass`` replaces. Not
changed: annotations, imports, docstrings and other texts for people (those with a space; those in
``raise``, log calls and ``help=``), f-strings, ``__all__``, ``__slots__``, arguments of
``@dataclass``. Not removed: log calls, and assertions (they narrow types).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("comm", "engine", "pipeline", "recipes", "framework/wavemare")
AREAS = (*PRODUCT[:3], *(f"framework/wavemare/{name}" for name in ("hf", "models", "parallel")))
# Tests of these folders share the ranks of their file: a hit by one counts for all.
SHARED = ("tests/multiproc/", "tests/mpi/")
# A mutant that takes this many seconds more than three times its tests' usual time is a hang.
MARGIN_S = 600

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not")},
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.IsNot: (r"is\s+not", "is"), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in")},
    **{ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "/"), ast.Div: ("/", "*")},
    **{ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: (r"\*\*", "*")},
    **{ast.BitAnd: ("&", "|"), ast.BitOr: (r"\|", "&"), ast.BitXor: (r"\^", "&")},
    **{ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.MatMult: ("@", "*")},
    **{ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Not: ("not ", ""), ast.USub: ("-", "+")},
}
REMOVABLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise, ast.Delete)
REMOVABLE += (ast.Break, ast.Continue)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# How code begins that is left alone, code whose strings are messages or types, and decorators
# after which no probe can be called.
SKIPPED = re.compile(
    r"(__all__|__slots__|if TYPE_CHECKING|from|import)\b|[\w.]*\b(dataclass\(|Literal\[)"
)
MESSAGES = re.compile(
    r"raise\b|(help|description)=|[\w.]*\b(cast|TypeVar|NewType|print|debug|info|warn|warning|"
    r"warning_once|error|exception|critical|log|log_dist)\("
)
COMPILED = re.compile(r"\b(compiled|n?jit)\b")

PROBE = """
import json, os
from os import O_APPEND, O_CREAT, O_WRONLY, close, write, open as open_file

FOLDER, seen, last = {folder!r}, set(), ["import"]

def hit(mutant):
    test = last[0] = os.environ.get("PYTEST_CURRENT_TEST", last[0])
    if (mutant, test) not in seen:
        seen.add((mutant, test))
        add(f"{{mutant}}.txt", test)

def add(name, text):
    file = open_file(f"{{FOLDER}}/{{name}}", O_APPEND | O_CREAT | O_WRONLY, 0o644)
    write(file, (text + "\\n").encode())
    close(file)

def pytest_runtest_logreport(report):
    add("tests.jsonl", json.dumps([report.nodeid, report.when, report.duration, report.outcome]))
"""


class Source:
    """A file's text and tree, and where its nodes lie in the text."""

    def __init__(self, file):
        self.text = file.read_bytes()
        self.tree = ast.parse(self.text)
        self.lines = [0, *(line.end() for line in re.finditer(rb"\n", self.text))]

    def start(self, node):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        return self.lines[first - 1] + node.col_offset

    def end(self, node):
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def code(self, node):
        return self.text[self.start(node) : self.end(node)].decode()


def sources_of(folder, areas):
    """Read the areas' Python files. Folders that are links belong to another area."""
    files = [
        Path(place, name)
        for area in areas
        for place, _, found in os.walk(folder / area)
        for name in found
        if name.endswith(".py")
    ]
    return {str(file.relative_to(folder)): Source(file) for file in sorted(files)}


Edit = tuple[str, int, int, list[str]]
"""A kind, the first byte, the byte after the last, and what may take their place."""


def edits(source, node, messages=False):
    """Yield all changes of a node and of what lies in it. Strings in messages stay."""
    code = source.code(node) if hasattr(node, "lineno") else ""
    if SKIPPED.match(code) or isinstance(node, ast.JoinedStr) or is_text(node):
        return
    speaks = bool(MESSAGES.match(code))
    declares = isinstance(node, ast.AnnAssign) and node.value is None
    if isinstance(node, REMOVABLE) and not declares and not (speaks and isinstance(node, ast.Expr)):
        yield "statement", source.start(node), source.end(node), ["pass" + "\n" * code.count("\n")]
    if isinstance(node, ast.Constant) and "\n" not in code:
        if new := [repr(value) for value in other_values(node.value, messages)]:
            yield "constant", source.start(node), source.end(node), new
    for operator, start, end in operators(source, node):
        old, new_operator = OPERATORS.get(type(operator), (".^", ""))
        if place := re.compile(old.encode()).search(source.text, start, end):
            yield "operator", place.start(), place.end(), [new_operator]
    for name, child in ast.iter_fields(node):
        for part in child if isinstance(child, list) else [child]:
            if isinstance(part, ast.AST) and name not in ("annotation", "returns"):
                yield from edits(source, part, messages or speaks)


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def other_values(value, messages):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1, value - 1] if value else [value + 1]
    words = isinstance(value, str) and not messages and " " not in value
    return [value + "X"] if words else []


def operators(source, node):
    """Return the operators of an expression, and between which bytes each is written."""
    if isinstance(node, (ast.Compare, ast.BoolOp)):
        logical = isinstance(node, ast.BoolOp)
        sides = node.values if logical else [node.left, *node.comparators]
        kinds = [node.op] * (len(sides) - 1) if logical else node.ops
        places = zip(map(source.end, sides[:-1]), map(source.start, sides[1:]), strict=True)
        return [(kind, *place) for kind, place in zip(kinds, places, strict=True)]
    if isinstance(node, ast.BinOp):
        return [(node.op, source.end(node.left), source.start(node.right))]
    if isinstance(node, ast.AugAssign):
        return [(node.op, source.end(node.target), source.start(node.value))]
    if isinstance(node, ast.UnaryOp):
        return [(node.op, source.start(node), source.start(node.operand))]
    return []


def sample(options):
    """Draw mutants, each by itself: what changes elsewhere changes nothing about it."""
    sources = sources_of(copy_of(options, "sample"), AREAS)
    drawn, seen = [], Counter()
    for file, source in sources.items():
        for kind, start, end, new in edits(source, source.tree):
            old, before = source.text[start:end].decode(), lines_at(source.text, start, end)
            what = (file, kind, before, old)
            name = f"{what} {seen[what]}"
            seen[what] += 1
            generator = random.Random(f"{int(options.seed, 16)} {name}")
            mutant = {"id": f"{zlib.crc32(name.encode()):08x}", "file": file}
            mutant |= {"line": source.text.count(b"\n", 0, start) + 1, "kind": kind}
            mutant |= {"start": start, "end": end, "old": old, "before": before}
            drawn.append((generator.random(), mutant | {"new": generator.choice(new)}))
    drawn.sort(key=itemgetter(0))
    mutants = []
    for _, mutant in drawn:
        source = sources[mutant["file"]]
        changed = mutated(source.text, mutant)
        with contextlib.suppress(SyntaxError):
            if ast.dump(ast.parse(changed)) != ast.dump(source.tree):
                start, new = mutant["start"], mutant["new"].strip()
                after = lines_at(changed, start, start + len(new))
                mutants.append(mutant | {"after": after})
                print("{id} {file}:{line}  {before}  ->  {after}".format(**mutants[-1]))
        if len(mutants) == options.count:
            break
    write(
        options.folder / "sample.json",
        {"seed": options.seed, "places": len(drawn), "mutants": mutants},
    )


def lines_at(text, start, end):
    """Return the lines in which a piece of a text lies, without indentation; at most two."""
    first, last = text.rfind(b"\n", 0, start) + 1, text.find(b"\n", end)
    lines = [line.strip() for line in text[first : None if last < 0 else last].splitlines()]
    return b" ".join(lines[:2]).decode() + (" ..." if lines[2:] else "")


def mutated(text, mutant):
    start, end = mutant["start"], mutant["end"]
    if text[start:end] != mutant["old"].encode():
        sys.exit(f"{mutant['file']} has changed: draw the sample again, whose ids stay")
    return text[:start] + mutant["new"].encode() + text[end:]


Function = tuple[str, Any]
"""A file, and a function in it."""


def probes(sources, uses, mutant):
    """Yield the file and the place of all statements before which a probe is called.

    A statement at the level of a module or a class runs at its import, and numba and Triton take
    no probe: for these, all functions count that name what the statement defines.
    """
    file, place = mutant["file"], mutant["start"]
    source = sources[file]
    inside = [n for n in ast.walk(source.tree) if isinstance(n, ast.stmt)]
    inside = [n for n in inside if source.start(n) <= place < source.end(n)]
    bodies = [n for n in inside if isinstance(n, FUNCTIONS) and source.start(n.body[0]) <= place]
    compiled = {n.name for n in bodies if is_compiled(n)}
    if bodies and not compiled:
        while source.code(inside[-1]).startswith("elif"):
            inside.pop()
        yield file, source.start(inside[-1])
        return
    classes = {n.name for n in inside if isinstance(n, ast.ClassDef)}
    assigned = getattr(inside[-1], "targets", None) or [getattr(inside[-1], "target", None)]
    wanted = compiled or classes or {n.id for n in assigned if isinstance(n, ast.Name)}
    for _ in range(3):  # a compiled function that names it has callers, too
        wanted |= {n.name for (_, n), used in uses.items() if used & wanted and is_compiled(n)}
    own = [n for n in inside if isinstance(n, (ast.ClassDef, *FUNCTIONS))][:1]
    own = own if own or wanted else [source.tree]
    functions = [(file, n) for part in own for n in ast.walk(part) if isinstance(n, FUNCTIONS)]
    functions += [function for function, used in uses.items() if used & wanted]
    for name, function in dict.fromkeys(functions):
        body = function.body[is_text(function.body[0]) :]
        if body and not is_compiled(function):
            yield name, sources[name].start(body[0])


def is_compiled(function):
    return any(COMPILED.search(ast.unparse(d)) for d in function.decorator_list)


def map_tests(options):
    drawn = json.loads((options.folder / "sample.json").read_text())
    copy, hits = copy_of(options, "map"), options.folder / "hits"
    shutil.rmtree(hits, ignore_errors=True)
    hits.mkdir()
    (copy / "framework" / "mutant_probe.py").write_text(PROBE.format(folder=str(hits)))
    sources = sources_of(copy, PRODUCT)
    functions = [
        (file, n) for file, s in sources.items() for n in ast.walk(s.tree) if type(n) in FUNCTIONS
    ]
    uses = {
        (file, function): {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(function)}
        for file, function in functions
    }
    calls: dict[tuple[str, int], list[str]] = {}
    for mutant in drawn["mutants"]:
        mutated(sources[mutant["file"]].text, mutant)
        for place in set(probes(sources, uses, mutant)):
            calls.setdefault(place, []).append(mutant["id"])
    for file, place in sorted(calls, reverse=True):  # from a file's end to its beginning
        text = (copy / file).read_bytes()
        before = text[text.rfind(b"\n", 0, place) + 1 : place]
        hits_here = [f"__import__('mutant_probe').hit('{name}')" for name in calls[file, place]]
        probe = "; ".join(hits_here).encode() + (b"; " if before.strip() else b"\n" + before)
        (copy / file).write_bytes(text[:place] + probe + text[place:])
    variables = environment(copy) | {"PYTEST_PLUGINS": "mutant_probe"}
    variables["PYTEST_ADDOPTS"] = "-p no:cacheprovider"
    for command in options.command or ci_commands(copy):
        print("+", command, flush=True)
        subprocess.run(command, shell=True, cwd=copy, env=variables, check=False)
    write(options.folder / "map.json", read_hits(hits, drawn["mutants"]))


def ci_commands(copy):
    words = ["make", "-n", f"VENV={sys.prefix}", "test-ci"]
    planned = subprocess.run(words, cwd=copy, check=True, capture_output=True, text=True).stdout
    return [line for line in planned.splitlines() if "-m pytest" in line]


def read_hits(hits, mutants):
    """Return how long each test took, and which tests run each mutant's place."""
    seconds: dict[str, float] = {}
    reports = {(line[0], line[1]): line[2:] for line in read_lines(hits / "tests.jsonl")}
    for (test, _), (duration, _) in reports.items():
        seconds[test] = seconds.get(test, 0.0) + duration
    failed = {test for (test, _), (_, outcome) in reports.items() if outcome == "failed"}
    print(f"{len(seconds)} tests; failed with the probes: {sorted(failed) or 'none'}")
    covering = {}
    for mutant in mutants:
        file = hits / f"{mutant['id']}.txt"
        found = set(file.read_text().splitlines()) if file.exists() else set()
        tests = {line.rpartition(" (")[0] for line in found}
        # What a fixture has made, other tests of the file may use.
        shared = {t.split("::")[0] for t in tests if t.startswith(SHARED)}
        shared |= {line.split("::")[0] for line in found if line.endswith(" (setup)")}
        chosen = [test for test in seconds if test in tests or test.split("::")[0] in shared]
        print(f"{mutant['id']} {len(chosen)} tests, {sum(map(seconds.get, chosen)):.0f} s")
        covering[mutant["id"]] = chosen
    return {"seconds": seconds, "covering": covering}


class Chosen:
    """A plugin of pytest: run the tests with these ids, and report what runs and what fails."""

    def __init__(self, tests, report):
        self.tests, self.report = set(tests), Path(report)

    def note(self, *words):
        with self.report.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def pytest_collection_modifyitems(self, items):
        items[:] = [i for i in items if {i.nodeid, i.nodeid.split("::")[0]} & self.tests]

    def pytest_runtest_logstart(self, nodeid):
        self.note("running", nodeid)

    def pytest_runtest_logreport(self, report):
        self.note(report.outcome, report.nodeid)

    def pytest_collectreport(self, report):
        self.note(report.outcome, report.nodeid)


def run_pytest(request):
    words, tests, report = json.loads(Path(request).read_text())
    sys.path[0] = os.getcwd()
    return pytest.main(
        ["-x", "-q", "-p", "no:cacheprovider", *words], plugins=[Chosen(tests, report)]
    )


class Job:
    """A copy of the repository in which mutants are tried, one after another."""

    def __init__(self, copy, seconds):
        self.copy, self.seconds = copy, seconds
        self.sound: set[str] = set()

    def first_failure(self, tests):
        """Run tests, the shortest files first; return which fails, or how pytest ended."""
        lengths: dict[str, float] = {}
        for test in tests:
            file = test.split("::")[0]
            lengths[file] = lengths.get(file, 0.0) + self.seconds.get(test, 0.0)
        request, report = self.copy.with_suffix(".request"), self.copy.with_suffix(".report")
        report.unlink(missing_ok=True)
        temporary = f"--basetemp={self.copy.with_suffix('.tmp')}"
        write(request, [[temporary, *sorted(lengths, key=lengths.__getitem__)], tests, str(report)])
        shutil.rmtree(self.copy / ".hypothesis", ignore_errors=True)
        with self.copy.with_suffix(".log").open("wb") as log:
            words = [sys.executable, __file__, "pytest", str(request)]
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(words, cwd=self.copy, env=environment(self.copy), **streams)
            try:
                ended = f"code {process.wait(3 * sum(lengths.values()) + MARGIN_S)}"
            except subprocess.TimeoutExpired:
                ended = "timeout"
            end_all_of(self.copy)
            process.wait()
        noted = read_lines(report)
        failed = [test for outcome, test in noted if outcome == "failed"]
        if failed or ended in ("code 0", "code 5"):  # 5: such tests are no longer there
            return failed[0] if failed else ""
        return f"{noted[-1][1] if noted else 'pytest'} ({ended})"

    def verdict(self, mutant, stages):
        """Run the stages' tests until one fails that passes without the mutant."""
        file = self.copy / mutant["file"]
        original, unsound = file.read_bytes(), []
        for tests in stages:
            rest = tests
            while rest:
                file.write_bytes(mutated(original, mutant))
                self.forget_compiled(original)
                failed = self.first_failure(rest)
                file.write_bytes(original)
                self.forget_compiled(original)
                if not failed:
                    break
                name = re.sub(r" \((code .*|timeout)\)$", "", failed)
                again = [name] if "::" in name else [t for t in rest if t.split("::")[0] == name]
                if name in self.sound or not self.first_failure(again or rest[:1]):
                    self.sound.add(name)
                    return {"result": "killed", "by": failed}
                unsound.append(failed)
                left = [test for test in rest if test not in again]
                rest = left if len(left) < len(rest) else []
        return {"result": "survived", "by": "", "unsound": unsound}

    def forget_compiled(self, text):
        """Discard numba's code, which would outlive a change of another file that it contains."""
        if b"import compiled" in text:
            shutil.rmtree(self.copy.with_suffix(".numba"), ignore_errors=True)


def run(options):
    drawn = json.loads((options.folder / "sample.json").read_text())
    known = json.loads((options.folder / "map.json").read_text())
    results = options.folder / "results.jsonl"
    done = {result["id"] for result in read_lines(results)}
    chosen = [m for m in drawn["mutants"] if m["id"] not in done]
    if options.only:
        chosen = [m for m in drawn["mutants"] if m["id"] in options.only.split(",")]
    free: queue.Queue[Job] = queue.Queue()
    for number in range(options.jobs):
        free.put(Job(copy_of(options, f"job{number}"), known["seconds"]))

    def one(mutant):
        covering = known["covering"][mutant["id"]]
        unit = [test for test in covering if test.startswith("tests/unit/")]
        ranks = [test for test in covering if test not in unit]
        # Last, as what they need another test may have imported or cached: the area's unit tests.
        area = mutant["file"].removeprefix("framework/wavemare/").split("/")[0]
        others = [t for t in known["seconds"] if t.startswith(f"tests/unit/{area}/")]
        others = [test for test in others if test not in unit]
        stages = [options.tests] if options.tests else [unit, ranks, others]
        job = free.get()
        try:
            result = mutant | {"covering": len(covering)} | job.verdict(mutant, stages)
        finally:
            free.put(job)
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print("{id} {file}:{line} {result} {by}".format(**result), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, chosen))


def table(options):
    drawn = json.loads((options.folder / "sample.json").read_text())
    reasons = json.loads(options.arguments.read_text()) if options.arguments else {}
    results = {result["id"]: result for result in read_lines(options.folder / "results.jsonl")}
    found = [
        results[mutant["id"]] | mutant for mutant in drawn["mutants"] if mutant["id"] in results
    ]
    lines = ["| id | place | line, and what it becomes | noticed by |", "|---|---|---|---|"]
    states = []
    for result in found:
        result["argument"] = reason = reasons.get(result["id"], "")
        killed = result["result"] == "killed"
        states.append("killed" if killed else "equivalent" if reason else "alive")
        why = f"`{result['by']}`" if killed else f"{states[-1]}: {reason or 'no test notices it'}"
        change = f"`{result['before']}`<br>`{result['after']}`"
        cells = [f"`{result['id']}`", f"`{result['file']}:{result['line']}`", change, why]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    killed, equivalent, alive = map(states.count, ("killed", "equivalent", "alive"))
    heading = [
        "# Mutants",
        "",
        f"{len(found)} of {drawn['places']} possible changes of one place, drawn with the seed "
        f"{drawn['seed']} by `tests/tools/mutants.py`,",
        "each against the CI tests that run the place. "
        f"{killed} are killed, {equivalent} are equivalent, {alive} are alive: "
        f"{killed / max(1, killed + alive):.0%} of those that change anything are noticed.",
        "",
    ]
    options.output.write_text("\n".join([*heading, *lines]) + "\n")
    write(options.output.with_suffix(".json"), drawn | {"mutants": found})
    print(" ".join(heading[2:4]))


def copy_of(options, name):
    """Write a commit's files into a new folder, compiled such that any change is noticed."""
    folder = options.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = ["git", "archive", options.commit]
    files = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=files, check=True)
    words = ["compileall", "-q", "--invalidation-mode", "checked-hash", *PRODUCT]
    subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)
    return folder


def environment(copy):
    """Return variables with which Python imports a copy, and no cache hides a change in it."""
    return os.environ | {
        "PYTHONPATH": str(copy / "framework"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": str(copy.with_suffix(".numba")),
        "OMP_NUM_THREADS": "1",
    }


def end_all_of(copy):
    """End the processes that were started with a copy's variables, whatever their session."""
    mark = f"PYTHONPATH={copy / 'framework'}\0".encode()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (place / "environ").read_bytes():
                os.kill(int(place.name), signal.SIGKILL)


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(file, value):
    file.write_text(json.dumps(value, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description="How to use it: see the head of the file.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "mutants"))
    parser.add_argument("--commit", default="HEAD", help="whose files are copied")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("sample")
    command.add_argument("--seed", default="ca69824", help="a hexadecimal number")
    command.add_argument("--count", type=int, default=60)
    command.set_defaults(do=sample)
    command = commands.add_parser("map")
    command.add_argument("--command", action="append", help="in place of what `make test-ci` runs")
    command.set_defaults(do=map_tests)
    command = commands.add_parser("run")
    command.add_argument("--jobs", type=int, default=1)
    command.add_argument("--only", help="ids of mutants, parted by commas: try them again")
    command.add_argument("--tests", action="append", help="a test or file in place of the map's")
    command.set_defaults(do=run)
    command = commands.add_parser("table")
    command.add_argument("--arguments", type=Path, help="JSON: id to why it is equivalent")
    command.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "mutants.md")
    command.set_defaults(do=table)
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.do(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["pytest"]:
        sys.exit(run_pytest(sys.argv[2]))
    main()
