"""A model's files, and Quire's own, are replaced under a running engine, and a process is killed.

Cores and worker processes look for that as they do in production; what they compute is fake.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, fake_modules, runtime_folders, wait_for_end, wait_until
from fake_process import MODULE
from quire import LLM, EngineArgs, SamplingParams
from quire.frontend.cli.entry import run_command
from quire.frontend.daemon import add_engine, find_log
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.models.model_folder import pocket_folder
from quire.ipc.daemon.run_dir import find_daemon, find_named, find_owner
from quire.ipc.errors import EngineDeadError, FilesChangedError
from quire.ipc.files.file_identity import find_digest, stamp_file

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
PARAMS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, detokenize=False)
PROMPT = "Once upon a time"
NUM_STEPS = 401  # of a request with PARAMS, alone
PACKAGE = Path(__file__).parents[2]
WORKER, LOOP = "worker/worker.py", "core/engine/engine_loop.py"


@pytest.fixture(scope="module", autouse=True)
def folders() -> Iterator[None]:
    with runtime_folders(), fake_modules(MODULE):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(pocket_folder(), tmp_path / "model"))


def change(content: bytes) -> bytes:
    """Other weights of the same shapes: the second half, which has no names in it, from back to front."""
    middle = len(content) // 2 // 4 * 4
    return content[:middle] + content[middle:][::-1]


def put_others(file: Path) -> None:
    file.with_suffix(".new").write_bytes(change(file.read_bytes()))
    file.with_suffix(".new").replace(file)


def write_others_in_place(file: Path) -> None:
    status = file.stat()
    content = change(file.read_bytes())
    with file.open("r+b") as stream:
        stream.write(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def put_the_same(file: Path) -> None:
    shutil.copy(file, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def slow_down(first: int) -> str:
    """Hooks of half a minute's delay from this step on: what is done before finds the request unfinished."""
    return ",".join(f"worker.execute:slow@{step}" for step in range(first, first + 100))


def kill(engine: LLMEngine, role: str) -> None:
    os.kill(engine.facts.pids[role], signal.SIGKILL)


def run(
    engine: LLMEngine,
    name: str,
    at: int = 0,
    do: Callable[[], None] = lambda: None,
    tokens: list[int] | None = None,
) -> list[int]:
    """The tokens of a request; something is done to the engine once it has more than `at` of them."""
    engine.add_request(name, PROMPT, PARAMS)
    tokens = [] if tokens is None else tokens
    is_done = False
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[:] = output.outputs[0].token_ids
        if len(tokens) > at and not is_done:
            is_done = True
            do()
    return tokens


@pytest.mark.parametrize(
    ("role", "replace"),
    [
        ("worker", write_others_in_place),
        pytest.param("core", put_others, marks=pytest.mark.slow),
        pytest.param("worker", put_others, marks=pytest.mark.slow),
        pytest.param("core", write_others_in_place, marks=pytest.mark.slow),
        pytest.param("worker", Path.unlink, marks=pytest.mark.slow),
        pytest.param("core", Path.unlink, marks=pytest.mark.slow),
    ],
)
def test_weights_that_were_replaced_are_refused_by_name_and_no_token_is_theirs(
    folder: Path, role: str, replace: Callable[[Path], None]
) -> None:
    hooks = slow_down(NUM_STEPS + 40)
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), log_level="ERROR", fault_hooks=hooks))
    tokens: list[int] = []

    def attack() -> None:
        replace(folder / WEIGHTS)
        kill(engine, role)

    try:
        want = run(engine, "before")
        with pytest.raises(EngineDeadError, match=f"{WEIGHTS}=.*is not the file.*quire daemon restart"):
            run(engine, "hit", 20, attack, tokens)
        assert len(tokens) > 20
        assert tokens == want[: len(tokens)]
    finally:
        engine.close()


@pytest.mark.usefixtures("restored_torch")
def test_a_real_worker_refuses_other_weights_than_were_noted_before_and_after_it_has_read_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.worker import worker

    config = EngineArgs(model=str(folder)).create_engine_config()
    load_model = worker.load_model

    def load_then_replace(*arguments: Any) -> Any:
        model = load_model(*arguments)
        put_others(folder / WEIGHTS)
        return model

    monkeypatch.setattr(worker, "load_model", load_then_replace)
    with pytest.raises(FilesChangedError, match=f"{WEIGHTS}="):
        worker.Worker(config, lambda _phase: None).start()
    monkeypatch.setattr(worker, "load_model", lambda *_: pytest.fail("it reads them"))
    with pytest.raises(FilesChangedError, match=f"{WEIGHTS}="):
        worker.Worker(config, lambda _phase: None).start()


@pytest.mark.parametrize("roles", [["core"], pytest.param(["worker", "core"], marks=pytest.mark.slow)])
def test_the_same_weights_from_elsewhere_cost_no_token(folder: Path, roles: list[str]) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), log_level="ERROR"))
    try:
        want = run(engine, "before")
        noted = stamp_file(folder / WEIGHTS)
        assert wait_until(lambda: find_digest(noted) is not None, 10.0)
        for number, role in enumerate(roles):

            def attack(role: str = role) -> None:
                put_the_same(folder / WEIGHTS)
                (folder / WEIGHTS).chmod(0o400)
                kill(engine, role)

            assert run(engine, f"hit-{number}", 20, attack) == want
        assert stamp_file(folder / WEIGHTS) != noted
    finally:
        engine.close()


def test_whoever_reads_another_tokenizer_is_refused_by_name(folder: Path) -> None:
    """Who has read the right one goes on, until something has to read it again."""
    config = EngineArgs(model=str(folder), log_level="ERROR").create_engine_config()
    with Daemon("tokenizer", config) as daemon, LLM(attach=daemon.name) as llm:
        want = llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        put_others(folder / TOKENIZER)
        (folder / "chat_template.jinja").unlink()
        with pytest.raises(FilesChangedError, match=f"{TOKENIZER}=|chat_template.jinja="):
            LLM(attach=daemon.name)
        assert llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == want
        pid = daemon.pid
        kill(llm.llm_engine, "worker")
        with pytest.raises(EngineDeadError, match=f"{TOKENIZER}="):
            llm.generate([PROMPT], PARAMS, use_tqdm=False)
        wait_for_end(pid, 30.0)  # it does not try again and again
        assert find_owner(find_named(daemon.name)) is None


# What a program does whose copy of Quire is changed under it. argv: the file, relative to the copy.
SOURCES = """
import os, pathlib, shutil, signal, sys
import psutil, quire
from quire import EngineArgs, SamplingParams
from quire.frontend.client import engines
from quire.frontend.llm_engine import LLMEngine

root = pathlib.Path(quire.__file__).parent
engines.CORE_MODULE = "fake_process"
name, role, how = sys.argv[1:]
engine = LLMEngine.from_engine_args(EngineArgs(log_level="ERROR"))
params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, detokenize=False)
engine.add_request("a", "Once upon a time", params)
tokens = []
while len(tokens) < 20:
    for output in engine.step():
        tokens = output.outputs[0].token_ids
file = root / name
if how == "change":
    file.write_text(file.read_text() + "# another version\\n")
elif how == "remove":
    file.unlink()
elif how == "add":
    (file.parent / "added.py").touch()
elif how.startswith("relink"):  # as releases are put in place of each other
    other = root.parent.with_name("other") / root.name
    shutil.copytree(root, other, ignore=shutil.ignore_patterns("__pycache__"))
    if how == "relink":
        (other / name).write_text(file.read_text() + "# another version\\n")
    root.parent.with_name("new").symlink_to(other.parent)
    root.parent.with_name("new").replace(root.parent)
else:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
children = psutil.Process().children(recursive=True)
next(one for one in children if role in one.cmdline()).send_signal(signal.SIGKILL)
try:
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = output.outputs[0].token_ids
    print("finished", len(tokens))
except Exception as error:
    print(type(error).__name__, error)
engine.close()
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "tests", "docs", ".*", "*.egg-info", "build")
    return Path(shutil.copytree(PACKAGE, tmp_path_factory.mktemp("copy") / "quire", ignore=ignored))


@pytest.mark.parametrize(
    ("name", "role", "how", "words"),
    [
        (WORKER, "worker", "change", "EngineDeadError .*worker.py=.*has changed"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # each a case of test_own_sources.py, too
            for case in (
                (LOOP, "engine-core", "relink", "EngineDeadError .*engine_loop.py=.*has changed"),
                (LOOP, "engine-core", "relink the same", "finished 400"),
                (WORKER, "worker", "same", "finished 400"),
                (LOOP, "engine-core", "change", "EngineDeadError .*engine_loop.py=.*has changed"),
                ("worker/threads.py", "worker", "remove", "EngineDeadError .*threads.py=.*was removed"),
                (
                    "kernels/program/program.h",
                    "worker",
                    "add",
                    "EngineDeadError .*added.py=.*was added",
                ),
                ("kernels/linear/linear.cpp", "engine-core", "same", "finished 400"),
                (WORKER, "worker", "relink", "EngineDeadError .*worker.py=.*has changed"),
            )
        ),
    ],
)
def test_a_process_starts_only_children_of_its_own_sources(
    copy: Path, tmp_path: Path, name: str, role: str, how: str, words: str
) -> None:
    before = (copy / name).read_bytes()
    link = tmp_path / "current"
    link.symlink_to(copy.parent)
    environment = {**os.environ, "PYTHONPATH": f"{link}:{Path(__file__).parents[1]}"}
    command = [sys.executable, "-c", textwrap.dedent(SOURCES), name, role, how]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    finally:
        (copy / name).write_bytes(before)
        (copy / name).with_name("added.py").unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert re.search(f"^{words}", line), line
    assert "finished" in words or "quire daemon restart" in line


def test_a_restart_after_a_replacement_starts_the_daemon_anew_and_says_why(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = ["daemon", "start", folder.name, "--name", "anew", "--log-level", "ERROR"]
    assert run_command(start) == 0
    try:
        first = find_daemon("anew")
        assert run_command(["daemon", "restart", "anew"]) == 0
        assert find_daemon("anew") == first  # nothing has changed: the same supervisor, another core
        put_others(folder / WEIGHTS)
        monkeypatch.chdir("/")
        os.kill(first, signal.SIGHUP)  # which ends nothing, since it could not start again
        assert wait_until(lambda: "it is not restarted: model.safetensors=" in read_log("anew"), 10.0)
        with LLM(attach="anew") as llm:
            assert llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].error is None
            worker = llm.llm_engine.facts.pids["worker"]
        with pytest.raises(FilesChangedError, match=WEIGHTS):
            add_engine("anew")
        (folder / "config.json").rename(folder / "config")
        assert run_command(["daemon", "restart", "anew"]) != 0
        assert find_daemon("anew") == first  # what cannot be started ends nothing
        (folder / "config").rename(folder / "config.json")
        os.kill(worker, signal.SIGKILL)
        wait_for_end(first, 30.0)
        capfd.readouterr()
        assert run_command(["ps"]) == 0
        assert re.search(
            r"^anew has failed: model\.safetensors=.*quire daemon restart", capfd.readouterr().out, re.M
        )
        assert run_command(["daemon", "restart", "anew"]) == 0
        assert find_daemon("anew") != first
        assert run_command(["ps"]) == 0
        assert "anew has failed" not in capfd.readouterr().out
    finally:
        run_command(["daemon", "stop", "anew"])
    assert run_command(["daemon", "restart", "anew"]) != 0  # it was stopped


def read_log(name: str) -> str:
    return find_log(name).read_text()


PROCESSOR = """
from quire import LogitsProcessor

class Same(LogitsProcessor):
    @classmethod
    def for_request(cls, request):
        return None

    def apply(self, logits):
        return None
"""


def test_the_code_of_a_logits_processor_is_one_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "same_logits.py"
    module.write_text(PROCESSOR)
    hooks = slow_down(40)
    args = EngineArgs(logits_processors=["same_logits:Same"], log_level="ERROR", fault_hooks=hooks)
    engine = LLMEngine.from_engine_args(args)

    def attack() -> None:
        module.write_text(PROCESSOR.replace("return None", "return 1"))
        kill(engine, "worker")

    try:
        with pytest.raises(EngineDeadError, match=r"same_logits\.py=.*is not the file"):
            run(engine, "hit", 20, attack)
    finally:
        engine.close()
