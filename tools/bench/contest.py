"""Contestants side by side: each a child process that runs jobs and says how long it took, in turn.

JSON lines over a child's standard input and output. One process a contestant, so that memory and threads
do not interfere; the ones that are not asked block in a read and use no CPU.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import psutil

from ...ipc.errors import QuireError
from .peers import Launch
from .workloads import BenchRequest

START_TIMEOUT_S = 900.0
JOB_TIMEOUT_S = 1800.0
IDLE_TIMEOUT_S = 5.0
IDLE_WINDOW_S = 0.1  # the kernel counts a process's time in steps of 0.01 s
IDLE_SHARE = 0.25  # of a core
CLOSE_TIMEOUT_S = 20.0  # vLLM's engine takes some seconds to end
SLOW_ROUND_S = 60.0  # who takes longer for a round gets that one only


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Run these requests, all there at the start. It carries their ids: a peer needs nothing of the bench.

    texts: to be embedded, instead of requests.
    """

    requests: list[BenchRequest] = []
    texts: list[str] = []


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


@dataclass(slots=True)
class Measurement:
    """All rounds of one contestant."""

    results: list[JobResult] = field(default_factory=list[JobResult])
    error: str | None = None

    @property
    def seconds(self) -> float:
        """Median of a round; there is one."""
        return statistics.median(result.seconds for result in self.results)

    @property
    def rate(self) -> float | None:
        """Median generated tokens per second; None without a result."""
        if not self.results:
            return None
        return statistics.median(r.num_output_tokens / r.seconds for r in self.results)

    @property
    def is_over(self) -> bool:
        """Whether no further round is worth its time."""
        return self.error is not None or any(result.seconds > SLOW_ROUND_S for result in self.results)


class Contestant:
    """The bench's end of one contestant: a process whose standard error goes to a log."""

    def __init__(self, name: str, launch: Launch, log_path: str) -> None:
        self.name = name
        self.ready_s = 0.0
        self.rss_bytes: dict[str, int] = {}
        self._log_path = log_path
        with open(log_path, "wb") as log:
            self._process = subprocess.Popen(
                launch.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **launch.environment},
                start_new_session=True,  # so that all of a peer's processes can be ended together
            )

    def wait_until_ready(self) -> None:
        """Block until the child can take jobs. Raises ContestError."""
        self.ready_s = self._take_report(START_TIMEOUT_S).ready_s or 0.0

    def run(self, job: Job) -> JobResult:
        """Run a job, wait for its result, and then until the child is idle. Raises ContestError."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # that it has ended is read below
            stdin.write(msgspec.json.encode(job) + b"\n")
            stdin.flush()
        report = self._take_report(JOB_TIMEOUT_S)
        if report.result is None:
            raise ContestError(f"{self.name}: {report.error}")
        _wait_until_idle(self._process.pid)
        return report.result

    def close(self) -> None:
        """End the child: its input ends, it has some time, then it and what it left behind are killed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            stdin.close()
            self._process.wait(CLOSE_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        stdout.close()

    def _take_report(self, timeout_s: float) -> ChildReport:
        """Its next line, which it writes at once. Raises ContestError, with its last words if it ended."""
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], timeout_s)[0]:
            raise ContestError(f"{self.name}: no answer within {timeout_s:.0f} s")
        line = stdout.readline()
        if not line:
            code = self._process.wait()
            with open(self._log_path, errors="replace") as log:
                said = [line.strip() for line in log if line.strip()] or ["no message"]
            raise ContestError(f"{self.name}: ended with code {code}: {said[-1]}")
        report = msgspec.json.decode(line, type=ChildReport)
        for role, size in report.rss_bytes.items():
            self.rss_bytes[role] = max(size, self.rss_bytes.get(role, 0))
        return report


@contextlib.contextmanager
def open_contestants(launches: Mapping[str, Launch]) -> Generator[list[Contestant]]:
    """All of them, started one after the other, so that each one's load time is its own."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as logs, contextlib.ExitStack() as stack:
        contestants: list[Contestant] = []
        for name, launch in launches.items():
            say(f"loading {name}")
            contestant = Contestant(name, launch, f"{logs}/{name}.log")
            stack.callback(contestant.close)
            contestant.wait_until_ready()
            contestants.append(contestant)
        yield contestants
        say("")


def run_rounds(
    contestants: Sequence[Contestant], num_rounds: int, label: str, make_job: Callable[[int], Job]
) -> dict[str, Measurement]:
    """So many rounds after a warm-up (number 0), each of the same job for all, every other one backwards."""
    measurements = {contestant.name: Measurement() for contestant in contestants}
    for number in range(num_rounds + 1):
        job = make_job(number)
        for contestant in contestants if number % 2 else contestants[::-1]:
            measurement = measurements[contestant.name]
            if measurement.is_over:
                continue
            say(f"{label} {f'round {number}' if number else 'warm-up'}: {contestant.name}")
            try:
                result = contestant.run(job)
            except ContestError as error:
                measurement.error = str(error)
                continue
            if number:
                measurement.results.append(result)
    return measurements


def say(text: str) -> None:
    """Progress on stderr: over itself on a terminal, else a line each."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def _wait_until_idle(pid: int) -> None:
    """vLLM's worker spins for a second after a job, which would take a core from who comes next."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    before = _measure_cpu_s(pid)
    while time.monotonic() < deadline:
        time.sleep(IDLE_WINDOW_S)
        now = _measure_cpu_s(pid)
        if now - before < IDLE_SHARE * IDLE_WINDOW_S:
            return
        before = now


def _measure_cpu_s(pid: int) -> float:
    """Processor seconds of a process and of all below it."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total
