"""Lets every test import the shared fakes (`from fakes import FakeWorker`), wherever it lies."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import faulthandler
import gc
import importlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import pytest_timeout
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
from processes import SharedRun

# Models that a test runs in this process (the "uni" backend, transformers) share the cores with engines in
# others; threads that spin while they wait take those cores. OpenMP reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Children are forked that never call gRPC. Its own handlers abort them where a server of it has run.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# A run starts some 400 interpreters. Where Python is told to keep no bytecode, as in many containers, each
# would compile Quire anew, a third of its start; git ignores what is kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What a shell runs in the background begins with Ctrl-C ignored, and so would what a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, Triton's kernels are interpreted on CPU tensors. Triton reads this when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# A pid that is 0 for none, or that another process has by now, would end the run without a word.
_RUN_PIDS, _kill = (os.getpid(), os.getppid()), os.kill


def _kill_no_run(pid: int, number: int) -> None:
    assert pid > 0, f"kill({pid}, {number}) would reach the whole run"
    assert pid not in _RUN_PIDS or number not in (signal.SIGKILL, signal.SIGSTOP), "it is this run's process"
    _kill(pid, number)


os.kill = _kill_no_run

NUM_PROCESSES = 3
NUM_ARGUMENT_BYTES = 160  # the longest `-m MODULE ROLE` has some 60
IMPORTED_BY_MOST = ("transformers.models.llama.modeling_llama",)  # processes, after their fork
TEST_S = 30.0
ASK_SHARED_SERVER = (  # e2e/conftest.py's, which takes seconds to start
    *("tests/e2e/compat/", "tests/e2e/clients/", "tests/e2e/test_agents_over_a_group.py"),
    *("tests/e2e/test_bench_serve_for_real.py", "tests/e2e/test_several_daemons.py"),
    "tests/e2e/test_stored_responses.py",
)

# How long an example takes on a busy machine says nothing of it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# What collecting the tests makes stays until the end. To look for garbage in it took 12 s of collecting them,
# and half a second each time afterwards. The end looks there too: libraries report what is left as leaks.
gc.disable()
atexit.register(gc.unfreeze)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are slow as a whole are imported only when they are named or slow tests are asked for."""
    is_test = collection_path.match("test_*.py") and config.option.markexpr == "not slow"
    return (is_test and b"\npytestmark = pytest.mark.slow" in collection_path.read_bytes()) or None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cases that are slow, a third of all, are made only where they are asked for: each takes a while."""
    if metafunc.config.option.markexpr != "not slow":
        return
    parametrize = metafunc.parametrize
    is_slow = metafunc.definition.get_closest_marker("slow") is not None

    def parametrize_usual(argnames: Any, argvalues: Iterable[Any], *more: Any, **options: Any) -> None:
        cases = list(argvalues)
        usual = [
            case for case in cases if not any(mark.name == "slow" for mark in getattr(case, "marks", ()))
        ]
        if options.get("ids") is None or callable(options["ids"]):
            cases = cases[:1] if is_slow or not usual else usual
        parametrize(argnames, cases, *more, **options)

    metafunc.parametrize = parametrize_usual


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Begin again with a longer command line, which leaves forked children room for theirs (forked.py)."""
    args = sys.orig_argv[1:]
    is_pytest = args[:2] == ["-m", "pytest"] or (args and Path(args[0]).name == "pytest")
    if is_pytest and sum(len(arg) + 1 for arg in sys.orig_argv) < NUM_ARGUMENT_BYTES:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        os.execv(sys.executable, [sys.executable, "-X", "room=" + "/" * NUM_ARGUMENT_BYTES, *args])


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"of tests ({NUM_PROCESSES} for the whole suite, else 0: this one)"
    parser.addoption("--processes", type=int, metavar="N", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """The whole suite runs in several processes: most tests wait for others.

    What names files or folders runs in this one.
    """
    options = session.config.option
    is_whole = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    num_processes = NUM_PROCESSES if is_whole and options.processes is None else options.processes
    if not num_processes or session.testsfailed or options.collectonly or options.usepdb:
        return None
    for name in IMPORTED_BY_MOST:
        importlib.import_module(name)
    SharedRun(session, find_group).run(num_processes)
    return True


def find_group(item: pytest.Item) -> str:
    """Tests that share a fixture stay in one process: those of a file, and all that ask the shared server."""
    return "shared_server" if item.nodeid.startswith(ASK_SHARED_SERVER) else item.nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(
    item: pytest.Item, settings: pytest_timeout.Settings
) -> Generator[None, object, object]:
    """Kills what a test has started when its time is over: its own clean-up may wait for their end.

    `with subprocess.Popen(...)` does, without a time limit: one process that does not end would hang the run.
    A minute later this process ends too, if it hangs where Python sees no signal.
    """
    result = yield
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(settings.timeout + 60.0, exit=True, file=stderr)
    started, fail = time.clock_gettime(time.CLOCK_BOOTTIME), signal.getsignal(signal.SIGALRM)

    def end(number: int, frame: FrameType | None) -> None:
        for process in psutil.Process().children():
            if process.create_time() - psutil.boot_time() > started - 0.01:  # the kernel counts in 10 ms
                process.kill()
        assert callable(fail)
        fail(number, frame)

    if callable(fail):
        signal.signal(signal.SIGALRM, end)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer() -> Generator[None, object, object]:
    faulthandler.cancel_dump_traceback_later()
    return (yield)


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of a test that is a coroutine. Other fixtures end before the loop does."""
    runner = asyncio.Runner()  # without a loop until something runs
    yield runner
    runner.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, for at most TEST_S."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    values = pyfuncitem.funcargs
    arguments = {name: values[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def run() -> None:
        async with asyncio.timeout(TEST_S):
            await pyfuncitem.obj(**arguments)

    values["runner"].run(run())
    return True


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """The compiled CPU kernels; what asks for them is skipped only where they are switched off."""
    from quire.kernels.program import native

    if native.is_switched_off():
        pytest.skip(f"{native.SWITCH}=0")
    found = native.load_library()
    assert found is not None
    return found


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads the kernels take; the number before holds again afterwards."""
    import torch
    from quire.kernels.program.native import set_num_threads

    before = torch.get_num_threads()
    yield set_num_threads
    set_num_threads(before)


@pytest.fixture
def restored_torch() -> Iterator[None]:
    """Gives torch's settings back that a worker in this process changes."""
    import torch

    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)


@pytest.fixture
def fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process' clients have cores with FakeWorkers, as fake_core.py makes them."""
    from forked import fork_children
    from quire.frontend.client import engines
    from quire.ipc.processes import process

    monkeypatch.setattr(process, "subprocess", fork_children())
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setattr(engines, "CORE_MODULE", "fake_core")


@pytest.fixture(autouse=True)
def own_sources_as_now() -> Iterator[None]:
    """Sources may be edited while tests run: a test has those that its first child finds."""
    yield
    if "quire.ipc.processes.own_sources" in sys.modules:
        sys.modules["quire.ipc.processes.own_sources"].__dict__["_noted"] = None
