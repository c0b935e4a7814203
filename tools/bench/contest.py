"""The tie between the bench and a contestant: a child process that runs workloads and says how long it took.

JSON lines over the child's standard input and output. One process a contestant, so that memory and threads
do not interfere; the ones that are not asked block in a read and use no CPU.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import msgspec
import psutil

from ...ipc.errors import QuireError
from .workloads import BenchRequest

START_TIMEOUT_S = 900.0
JOB_TIMEOUT_S = 1800.0
IDLE_TIMEOUT_S = 5.0
IDLE_WINDOW_S = 0.1  # the kernel counts a process's time in steps of 0.01 s
IDLE_SHARE = 0.25  # of a core
CLOSE_TIMEOUT_S = 20.0  # vLLM's engine takes some seconds to end


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Run these requests, all there at the start. It carries their ids: a peer needs nothing of the bench.

    texts: to be embedded, instead of requests.
    """

    requests: list[BenchRequest] = []
    texts: list[str] = []

    @property
    def num_output_tokens(self) -> int:
        """Tokens to generate, over all requests."""
        return sum(request.num_output_tokens for request in self.requests)


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a job took and did."""

    seconds: float
    num_requests: int
    num_output_tokens: int  # those asked for; padding that a batch generated besides does not count
    num_cached_tokens: int | None = None  # prompt tokens found in a prefix cache; None: it has no figure


class ChildReport(msgspec.Struct, frozen=True, kw_only=True):
    """The child's answer to everything: ready, a result, or an error."""

    ready_s: float | None = None  # from the start of its main to ready for jobs
    result: JobResult | None = None
    rss_bytes: dict[str, int] = {}  # role -> resident memory at this moment
    error: str | None = None


class ContestError(QuireError, RuntimeError):
    """A contestant failed; the text says which and why."""


class Engine(ABC):
    """A contestant's inside, in its own process."""

    @abstractmethod
    def run(self, job: Job) -> JobResult:
        """Generate everything, ignoring EOS, or embed everything, and time it."""

    @abstractmethod
    def measure_rss(self) -> dict[str, int]:
        """Resident bytes of this process and its children by role."""

    @abstractmethod
    def close(self) -> None:
        """Free what the process holds. The process ends afterwards."""


def serve(engine: Engine, started_at: float, reports: int) -> None:
    """Answer jobs from standard input until it ends. `reports`: file descriptor from `claim_stdout`."""
    _report(reports, ChildReport(ready_s=time.perf_counter() - started_at, rss_bytes=engine.measure_rss()))
    try:
        for line in sys.stdin:
            job = msgspec.json.decode(line, type=Job)
            try:
                result = engine.run(job)
            except Exception as error:
                _report(reports, ChildReport(error=f"{type(error).__name__}: {error}"))
                continue
            _report(reports, ChildReport(result=result, rss_bytes=engine.measure_rss()))
    finally:
        engine.close()


def claim_stdout() -> int:
    """Keep standard output for reports and send whatever libraries print there to standard error."""
    reports = os.dup(1)
    os.dup2(2, 1)
    return reports


class Contestant:
    """The bench's end of one contestant: a process that runs `command`, with `environment` on top of ours."""

    def __init__(
        self, name: str, command: Sequence[str], log_path: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.ready_s = 0.0
        self.rss_bytes: dict[str, int] = {}
        self._log_path = log_path
        with open(log_path, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # so that all of a peer's processes can be ended together
            )
        self._reports: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_reports, name=f"bench-{name}", daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        """Block until the child can take jobs. Raises ContestError."""
        report = self._take_report(START_TIMEOUT_S)
        self.ready_s = report.ready_s or 0.0

    def run(self, job: Job) -> JobResult:
        """Run a job, wait for its result, and then until the child is idle. Raises ContestError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContestError(self._describe_end()) from None
        report = self._take_report(JOB_TIMEOUT_S)
        if report.result is None:
            raise ContestError(f"{self.name}: {report.error}")
        wait_until_idle(self._process.pid)
        return report.result

    def close(self) -> None:
        """End the child: its input ends, it has some time, then it and what it left behind are killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(CLOSE_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()  # the child's end of the pipe is closed, so it has come to its end

    def _take_report(self, timeout_s: float) -> ChildReport:
        try:
            line = self._reports.get(timeout=timeout_s)
        except queue.Empty:
            raise ContestError(f"{self.name}: no answer within {timeout_s:.0f} s") from None
        if not line:
            raise ContestError(self._describe_end())
        report = msgspec.json.decode(line, type=ChildReport)
        for role, size in report.rss_bytes.items():
            self.rss_bytes[role] = max(size, self.rss_bytes.get(role, 0))
        return report

    def _read_reports(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._reports.put(line)
        self._reports.put(b"")

    def _describe_end(self) -> str:
        return describe_end(self.name, self._process.wait(), self._log_path)


def wait_until_idle(pid: int) -> None:
    """vLLM's worker spins for a second after a job, which would take a core from who comes next."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    before = sum(measure_cpu_s(pid).values())
    while time.monotonic() < deadline:
        time.sleep(IDLE_WINDOW_S)
        now = sum(measure_cpu_s(pid).values())
        if now - before < IDLE_SHARE * IDLE_WINDOW_S:
            return
        before = now


def measure_cpu_s(pid: int) -> dict[int, float]:
    """Processor seconds of a process and of each one below it, by process id."""
    found: dict[int, float] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


def describe_end(name: str, code: int, log_path: str) -> str:
    """Why a contestant ended: the last line that it wrote."""
    with open(log_path, errors="replace") as log:
        lines = [line.strip() for line in log if line.strip()]
    return f"{name}: ended with code {code}: {lines[-1] if lines else 'no message'}"


def _report(reports: int, report: ChildReport) -> None:
    os.write(reports, msgspec.json.encode(report) + b"\n")
