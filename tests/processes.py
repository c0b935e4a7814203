"""Runs the tests of a session in processes that are forked when everything is imported and collected.

To collect costs 12 s of processor time, which pytest-xdist pays in each of its processes. A process takes the
next group of tests from a pipe until it is empty, and says over another one what came of each. When a process
is killed, the test that it was at has failed, and another process goes on behind that.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import pytest
from _pytest import runner

_INDEX = struct.Struct("=H")


@dataclass
class _Process:
    """A process that runs tests, as its parent sees it."""

    pid: int
    pipe: int
    rest: list[pytest.Item]  # of the group that it has, from the test on that it runs
    line: bytes = b""  # the beginning of one
    error: str = ""  # that ended it


class SharedRun:
    """The tests of a session, of which those of a group run one after the other in one process."""

    def __init__(self, session: pytest.Session, find_group: Callable[[pytest.Item], str]) -> None:
        self._session, self._config = session, session.config
        if len(os.listdir("/proc/self/task")) > len(os.sched_getaffinity(0)):  # those of numpy's OpenBLAS
            raise pytest.UsageError(
                "a test's module has started threads, without which a fork hangs in OpenMP"
            )
        groups: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            groups.setdefault(find_group(item), []).append(item)
        # The slow ones first, so that no process ends long after the others.
        self._groups = sorted(groups.values(), key=lambda group: "/e2e/" not in group[0].nodeid)
        self._stops = mmap.mmap(-1, 1)
        self._queue, writer = os.pipe()
        os.write(writer, b"".join(map(_INDEX.pack, range(len(self._groups)))))
        os.close(writer)
        self._selector = selectors.DefaultSelector()

    def run(self, num_processes: int) -> None:
        """Until every test has run, or a process is told to stop."""
        for _ in range(num_processes):
            self._start([])
        try:
            while self._selector.get_map():
                for key, _ in self._selector.select():
                    self._read(key.data)
        except BaseException:
            self._stops[0] = 1
            for key in list(self._selector.get_map().values()):
                os.kill(key.data.pid, signal.SIGINT)
                self._end(key.data)
            raise
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _start(self, first: list[pytest.Item]) -> None:
        """Start a process that runs these tests, and then groups."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            self._serve(first, writer)
        os.close(writer)
        self._selector.register(reader, selectors.EVENT_READ, _Process(pid, reader, first))

    def _read(self, process: _Process) -> None:
        """Take what a process says: the group that it begins, what came of a test, and that it is over."""
        if not (data := os.read(process.pipe, 1 << 16)):
            self._end(process)
            return
        *lines, process.line = (process.line + data).split(b"\n")
        for line in lines:
            match json.loads(line):
                case int() as index:
                    process.rest = list(self._groups[index])
                case dict() as data:
                    hook = self._config.hook.pytest_report_from_serializable
                    report = hook(config=self._config, data=data)
                    if isinstance(report.longrepr, list):  # of a skipped test
                        report.longrepr = tuple(report.longrepr)
                    self._report(report)
                case str() as error:
                    process.error = error
                case _:
                    process.rest.pop(0)
        if self._session.shouldfail or self._session.shouldstop:
            self._stops[0] = 1

    def _end(self, process: _Process) -> None:
        self._selector.unregister(process.pipe)
        os.close(process.pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if self._stops[0] or not (process.rest or process.error):
            return
        if not process.rest:
            raise ChildProcessError(process.error)
        item = process.rest.pop(0)
        text = process.error or f"The process that ran {item.nodeid} ended with {code}."
        self._report(pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call"))
        self._start(process.rest)

    def _report(self, report: pytest.TestReport) -> None:
        self._config.hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            self._config.hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)

    def _serve(self, first: list[pytest.Item], fd: int) -> NoReturn:
        """A process from its start to its end."""
        plugins, reporter = self._config.pluginmanager, _Reporter(self._config, os.fdopen(fd, "wb"))
        try:
            capture: Any = plugins.getplugin("capturemanager")
            capture.stop_global_capturing()  # which reads the parent's file
            capture.start_global_capturing()
            plugins.unregister(name="terminalreporter")
            plugins.register(reporter)
            self._run_group(first, reporter)
            while not self._stops[0] and (data := os.read(self._queue, _INDEX.size)):
                [index] = _INDEX.unpack(data)
                reporter.say(index)
                self._run_group(self._groups[index], reporter)
        except BaseException:
            reporter.say(traceback.format_exc())
        finally:
            runner.pytest_sessionfinish(self._session)
            os._exit(0)

    def _run_group(self, items: list[pytest.Item], reporter: _Reporter) -> None:
        for item, after in zip(items, [*items[1:], None], strict=False):
            is_last = after is None or self._stops[0]
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=None if is_last else after)
            reporter.say(None)
            if is_last:
                return


class _Reporter:
    """Says to the parent what came of each test."""

    def __init__(self, config: pytest.Config, pipe: BinaryIO) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.say(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def say(self, what: object) -> None:
        """Write a line of JSON."""
        self._pipe.write(json.dumps(what).encode() + b"\n")
        self._pipe.flush()
