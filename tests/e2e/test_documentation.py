# SPDX-License-Identifier: Apache-2.0
"""Every command and program of README and docs is run; `documentation.toml` says how, or why not.

Pages whose blocks have titles are tutorials: blocks are files, changes of files and commands, and
are taken from top to bottom.
"""

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from wavemare.data.tokenizer import train_tokenizer
from wavemare.engine.launch.environment import free_port
from wavemare.report import read_run

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = Path(__file__).with_name("programs") / "commands.py"
RULES = tomllib.loads(Path(__file__).with_name("documentation.toml").read_text())
FENCE = re.compile(
    r"^```([\w{}]+)?(?: title=\"([^\"\n]*)\")?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
GPT = {"model_type": "gpt2", "n_layer": 8, "n_embd": 16, "n_head": 2, "n_positions": 64}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 8,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
LLAMA = {**BERT, "model_type": "llama", "max_position_embeddings": 512}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    title: str | None
    text: str

    def commands(self):
        lines = self.text.replace("\\\n", " ").splitlines()
        found = (re.sub(r"\s+#\s.*$", "", line).strip() for line in lines)
        return [re.sub(r" {2,}", " ", line) for line in found if line]

    @property
    def name(self):
        return f"{self.page}: {self.text.splitlines()[0][:60]}"


def read_blocks():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for language, title, _, text in FENCE.findall(page.read_text()):
            yield Block(str(page.relative_to(ROOT)), language, title or None, text)


BLOCKS = list(read_blocks())
TUTORIALS = sorted({block.page for block in BLOCKS if block.title})
REST = [block for block in BLOCKS if block.page not in TUTORIALS]
# The tables of results name the command of each row.
MEASURED = [ROOT / "docs" / "performance.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]
INLINE = re.findall(
    r"(?<!`)`((?:wavemare (?:train|simulate)|python -m benchmarks) [^`]+)`",
    "\n".join(page.read_text() for page in MEASURED),
)
COMMANDS = sorted(
    {" ".join(line.split()) for line in INLINE}
    | {line for block in REST if block.language == "bash" for line in block.commands()}
)
PROGRAMS = [block for block in REST if block.language in ("python", "json")]


def find(table, text):
    """Return the value of the first pattern of a table that a text has; None if it has none."""
    patterns = RULES[table].items()
    return next((value for key, value in patterns if re.search(key, text, re.M | re.S)), None)


def small(text):
    """Fill in the words that make commands small."""
    return re.sub(r"\{(\w+)\}", lambda found: RULES["small"][found[1]], text)


def change(text, subject):
    return text.replace(*(find("change", subject) or ("", "")))


def steps(line):
    """Return the lines to run for a command: what comes before it, and the command made small."""
    before = find("before", line) or []
    return tuple(map(small, [*before, f"{change(line, line)} {find('add', line) or ''}".strip()]))


def test_every_block_is_run_or_listed():
    """Commands are run if they are not listed; text and changes of files are there to be read."""
    known = {"bash", "python", "json", "diff", "text", "{toctree}"}
    assert [block.name for block in BLOCKS if block.language not in known] == []
    found = [(block.name, f"{block.page}\n{block.text}") for block in PROGRAMS]
    missing = [name for name, text in found if not (find("skip", text) or find("program", text))]
    assert missing == []


@pytest.fixture
def place(tmp_path, text_folder):
    """A folder with what the commands take for granted."""
    (tmp_path / "texts").symlink_to(text_folder)
    for name in ("recipes", "Makefile", "pyproject.toml", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "configs").symlink_to(ROOT / "docs" / "results" / "configs")
    (tmp_path / "train.py").write_text("import wavemare; wavemare.init_distributed()")
    shutil.copy(ROOT / "recipes" / "gpt" / "pretrain.py", tmp_path / "mine.py")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    for name, values in (("gpt", GPT), ("bert", BERT), ("llama", LLAMA)):
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    (model,) = (block.text for block in BLOCKS if '"model_type"' in block.text)
    (tmp_path / "my-model.json").write_text(model)
    texts = [file.read_text() for file in sorted(text_folder.iterdir())]
    (tmp_path / "book.txt").write_text("".join(texts))
    (tmp_path / "corpus" / "part").mkdir(parents=True)
    for folder in ("corpus", "corpus/part"):
        rows = [json.dumps({"text": text}) for text in texts]
        (tmp_path / folder / "rows.jsonl").write_text("\n".join(rows))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "articles.parquet")
    lines = [line for text in texts for line in text.splitlines()][:400]
    rows = [f"{line}\t{'good' if n % 2 else 'bad'}\t{n % 3}" for n, line in enumerate(lines)]
    for name in ("reviews.tsv", "texts.tsv"):
        (tmp_path / name).write_text("\n".join(["text\tlabel\tstars", *rows]))
    turns = [
        {"role": role, "content": line}
        for role, line in zip(["user", "assistant"] * 200, lines, strict=True)
    ]
    chats = [json.dumps({"messages": turns[n : n + 2]}) + "\n" for n in range(0, 400, 2)]
    (tmp_path / "chats.jsonl").write_text("".join(chats))
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "template.txt").write_text(template)
    train_tokenizer(lines, 300, kind="gpt").save_pretrained(tmp_path / "my-tokenizer")
    return tmp_path


@pytest.fixture
def shell(command, monkeypatch):
    """Run lines as a person would who has activated the environment; return what they print."""
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    environment = {
        **dict.fromkeys(names, "1"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "80",
        # DeepSpeed compiles a function of its Muon at each start: importing the compiler takes a
        # second of each rank, and none of the commands has anything compiled.
        "TORCHDYNAMO_DISABLE": "1",
    }

    def run(lines):
        # Other tests may have the launchers' default port.
        own = rf"\1 --master_port {free_port()} "
        lines = re.sub(r"^(deepspeed|torchrun) ", own, lines, flags=re.M)
        words = ("/bin/bash", "-euo", "pipefail", "-c", lines)
        if re.fullmatch(r"wavemare [\w ./:,=+-]+", lines):  # nothing in it is for a shell
            words = shlex.split(lines)
        ended = command(*words, environment=environment).check()
        assert "Traceback" not in ended.output
        return ended.output

    before = stock_buffers()
    yield run
    for file in stock_buffers() - before:
        file.unlink()


def stock_buffers():
    """Return the shared memory that stock DeepSpeed leaves behind, however its ranks end."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))


# A shell's redirections, and the files that they make, are there when a command really runs.
OURS = [
    line
    for line in COMMANDS
    if re.match(r"wavemare .|python -m benchmarks |.* -m(odule)? wavemare\.recipes", line)
    and not re.search(r" > | file:", line)
    and "--max-restarts" not in line  # needs an environment: test_elastic runs it
    and not (re.search(" --replicas |benchmarks elastic", line) and find_spec("torchft") is None)
]


def test_the_options_of_all_commands_are_accepted(launch, place):
    """Each command checks its options and their values, and those of what it starts."""
    # Files that other commands make, of which no more is looked at than that they are there.
    for run in (place / "runs" / f"{name}-pretrain" for name in ("gpt", "bert", "llama")):
        (run / "checkpoints" / "step-000002").mkdir(parents=True)
        (run / "checkpoints" / "latest").write_text("step-000002")
        (run / "model").mkdir()
        (run / "model" / "config.json").write_text('{"model_type": "gpt2"}')
        (run / "model" / "model.safetensors").touch()
    (place / "notes").symlink_to("texts")
    (place / "tokenizer").symlink_to("my-tokenizer")
    (place / "again").symlink_to("runs/gpt-pretrain/model")
    for file in ("corpus.bin", "corpus.idx", "tokens.bin", "tokens.idx", "docs/page.md"):
        (place / file).write_text("text")
    # Only on the page of Megatron `corpus` is no folder of texts.
    lines = json.dumps(
        [line.replace("--data-path corpus ", "--data-path tokens ") for line in OURS]
    )
    finished = launch(OPTIONS, lines, ranks=1, folder=place, own=True).check()
    assert finished.result(0) == {}


RUN = [line for line in COMMANDS if find("skip", line) is None]
CI = {min((line for line in RUN if re.search(key, line)), key=len) for key in RULES["ci"]}


BEFORE = {steps(line)[:n] for line in RUN for n in range(1, len(steps(line)))}


@pytest.fixture
def take(shell, place, tmp_path_factory):
    """Run lines one by one, or take what those that come before a command made before another one.

    The processes of a run of pytest share what was made; one makes it, and the others wait.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def run(lines):
        if not lines:
            return
        if lines not in BEFORE:
            run(lines[:-1])
            shell(lines[-1])
            return
        made = shared / f"made-{hashlib.sha256(repr(lines).encode()).hexdigest()[:16]}"
        with made.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if made.is_dir():
                shell(f"cp -a {made}/. {place}")
                return
            run(lines[:-1])
            shell(lines[-1])
            # Whole, or not at all.
            shell(f"cp -aT {place} {made}.part && mv {made}.part {made}")

    return run


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=line[:90], marks=[] if line in CI else [pytest.mark.nightly])
        for line in RUN
    ],
)
def test_a_command_runs(take, line):
    take(steps(line))


@pytest.mark.parametrize("page", ["docs/plans.md", "docs/planner.md"])
def test_what_a_page_shows_is_printed(shell, page):
    blocks = [block for block in BLOCKS if block.page == page]
    pairs = [
        (before, block)
        for before, block in pairwise(blocks)
        if (before.language, block.language) == ("bash", "text")
    ]
    assert pairs
    for before, block in pairs:
        check_printed(block, shell(before.text))


def check_printed(block, text):
    """Check that the paragraphs of a block are printed."""
    printed = [line.rstrip() for line in text.splitlines()]
    for paragraph in block.text.rstrip().split("\n\n"):
        lines = paragraph.splitlines()
        assert any(printed[n : n + len(lines)] == lines for n in range(len(printed))), printed


RANKS = (1, 2, 4)


def cases(ranks):
    for block in PROGRAMS:
        subject = f"{block.page}\n{block.text}"
        prelude, wanted = find("program", subject) or (None, None)
        if wanted == ranks and find("skip", subject) is None:
            text = (find("setup", subject) or "") + change(block.text, subject)
            yield {"name": block.name, "page": block.page, "text": text, "prelude": prelude}


@pytest.mark.parametrize("ranks", RANKS)
def test_programs_and_configurations_run(launch, tmp_path, ranks):
    chosen = list(cases(ranks))
    assert chosen
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(chosen))
    finished = launch("documentation.py", file, ranks=ranks).check()
    for rank in range(ranks):
        assert finished.result(rank) == [case["name"] for case in chosen]
    if ranks == 2:
        check_recorded(finished.folder / "runs")


def check_recorded(runs):
    """Read the run folders of the page on reports as a report would."""
    loop, trainer = read_run(runs / "mine"), read_run(runs / "trainer")
    assert [line["step"] for line in loop.metrics] == [5, 10, 15]
    assert [(r.rank, r.first_step, len(r.steps)) for r in loop.trace.ranks] == [
        (rank, 11, 4) for rank in (0, 1)
    ]
    assert [each.tag for each in loop.checkpoints if each.complete] == ["last"]
    assert [step for step, _ in trainer.series("loss")] == [2, 4]
    assert len(trainer.series("tokens_per_second")) == 2
    assert len(trainer.series("eval_loss")) == 1
    assert len(trainer.trace.ranks) == 2
    assert None not in (loop.summary, trainer.summary)


def apply(change, text):
    """Apply a diff without line numbers: what it removes stands there once."""
    lines = change.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(old) == 1, old
    return text.replace(old, new)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_runs_from_top_to_bottom(shell, tmp_path, page):
    printed = ""
    for block in BLOCKS:
        if block.page != page:
            continue
        if block.language == "bash":
            words = block.text.replace("--max_steps 40", "--max_steps 4")
            printed = shell(words.replace("--warmup_steps 10", "--warmup_steps 1"))
        elif block.language == "text" and not block.title and page == "docs/chats.md":
            check_printed(block, printed)
        elif block.language == "diff":
            file = tmp_path / block.title
            file.write_text(apply(block.text, file.read_text()))
        elif block.title:
            # For two printed lines: the first ten steps of PipeMare are synchronous.
            text = block.text.replace("range(1, 101)", "range(1, 21)")
            (tmp_path / block.title).write_text(text)
