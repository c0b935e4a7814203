"""`python -m quire.worker.sampling.grammar_process`: follows grammars that may take long, for a worker.

It loads the tokenizer's trie and forks a process for each text, which compiles it and forks one for each row.
So a row can be ended within a native call, by a limit of processor time that the kernel keeps (SIGPROF) or by
its worker, and costs no other. Started and spoken to by GrammarProcess (grammar_child.py), never by hand; all
end with their sockets. No torch, no numpy, and no thread: what forks has one.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...ipc.decoding import decode_msgpack
from ...ipc.params.structured_outputs import COMPILE_S, GrammarTime, find_replay_limit_s, make_timed_limits
from ...ipc.processes.process import EXIT_OK, Lifeline

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# To a row's process: processor seconds of a mask, number of tokens.
REQUEST = struct.Struct("<dI")
# Its answer: one of the next line, processor time in us of all and of what limits the next mask, bytes of the
# mask or of the error.
ANSWER = struct.Struct("<BQQI")
MASK, ENDING_MASK, ERROR = range(3)  # ENDING_MASK: the output may end here
PID = struct.Struct("<i")  # of a new process, 0 without one; to be reaped, negative: nobody asks how it ended
COMPILED = struct.Struct("<Q")  # first of all: processor time in us
END = struct.Struct("<iQ")  # exit code, processor time in us since it began
MAX_MEMORY_BYTES = 512 << 20  # of each process beyond the trie


class GrammarProcessArgs(msgspec.Struct, array_like=True, frozen=True):
    """What the process is told at its start."""

    tokenizer: str  # tokenizer.json
    vocab_size: int
    eos_token_ids: list[int]
    socket_fd: int


def main() -> int:
    """Fork a process for each text that comes."""
    lifeline = Lifeline()
    args = decode_msgpack(lifeline.args, GrammarProcessArgs)
    tokenizer = _load(args)
    _limit_memory()
    gc.collect()
    gc.freeze()
    _serve(args.socket_fd, functools.partial(_serve_rows, tokenizer))
    return EXIT_OK


def _serve(control_fd: int, run: Callable[[list[int]], None]) -> None:
    """Until the socket ends: have a new process `run` with the descriptors that come, or reap one."""
    with socket.socket(fileno=control_fd) as control:
        while True:
            data, fds, _, _ = socket.recv_fds(control, PID.size, 2)
            if fds:
                control.send(PID.pack(_fork(control, fds, run)))
            elif data:
                (pid,) = PID.unpack(data)
                _, status, usage = os.wait4(abs(pid), 0)
                work_us = int((usage.ru_utime + usage.ru_stime) * 1e6)
                if pid > 0:
                    control.send(END.pack(os.waitstatus_to_exitcode(status), work_us))
            else:
                return


def _fork(control: socket.socket, fds: list[int], run: Callable[[list[int]], None]) -> int:
    """The pid of a process that does `run`; 0 if there can be none."""
    try:
        pid = os.fork()
    except OSError:
        pid = 0
    else:
        if pid == 0:
            try:
                control.close()
                run(fds)
            except OSError:  # the worker is gone
                pass
            finally:
                os._exit(EXIT_OK)
    for fd in fds:
        os.close(fd)
    return pid


def _serve_rows(tokenizer: LLTokenizer, fds: list[int]) -> None:
    """Compile a text, and fork a process for each row that has it."""
    control_fd, text_fd = fds
    with open(text_fd, encoding="utf-8") as file:
        text = file.read()
    _limit_time(COMPILE_S)
    compiled = _compile(tokenizer, text)
    _limit_time(0.0)
    os.write(control_fd, COMPILED.pack(time.process_time_ns() // 1000))
    _serve(control_fd, functools.partial(_follow, compiled, -(-tokenizer.vocab_size // 32) * 4))


def _load(args: GrammarProcessArgs) -> LLTokenizer:
    from llguidance import LLTokenizer

    text = Path(args.tokenizer).read_text(encoding="utf-8")
    return LLTokenizer(text, n_vocab=args.vocab_size, eos_token=args.eos_token_ids)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _follow(compiled: LLMatcher | str, mask_bytes: int, fds: list[int]) -> None:
    """Answer one row's requests until its worker leaves. compiled: a new matcher, or what is wrong."""
    mask = bytearray(mask_bytes)
    address = ctypes.addressof((ctypes.c_char * mask_bytes).from_buffer(mask))
    consuming = GrammarTime()
    with socket.socket(fileno=fds[0]) as row, row.makefile("rb") as requests:
        while len(header := requests.read(REQUEST.size)) == REQUEST.size:
            limit_s, num_tokens = REQUEST.unpack(header)
            token_ids = list(memoryview(requests.read(4 * num_tokens)).cast("i"))
            began = counted = time.process_time()
            error, can_end = compiled if isinstance(compiled, str) else "", False
            try:
                if not isinstance(compiled, str):
                    is_replay = num_tokens > 1
                    _limit_time(find_replay_limit_s(num_tokens) if is_replay else limit_s)
                    error = _consume(compiled, token_ids, consuming)
                    if is_replay:
                        counted = time.process_time()
                        _limit_time(limit_s)
                    if not error:
                        compiled.unsafe_compute_mask_ptr(address, mask_bytes)
                        error = compiled.get_error()
                    can_end = compiled.is_accepting()
            except BaseException as panic:  # the library's own is no Exception
                error = f"llguidance panicked: {panic}"
            _limit_time(0.0)
            ended = time.process_time()
            body = error.encode() if error else bytes(mask)
            kind = ERROR if error else ENDING_MASK if can_end else MASK
            work_us, mask_us = (int((ended - since) * 1e6) for since in (began, counted))
            row.sendall(ANSWER.pack(kind, work_us, mask_us, len(body)) + body)


def _limit_time(limit_s: float) -> None:
    """Processor time from now on, after which the process is ended; 0.0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)


def _compile(tokenizer: LLTokenizer, text: str) -> LLMatcher | str:
    """A matcher, or what is wrong with the text."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**make_timed_limits(), verbose_errors=False)
    try:
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    except BaseException as panic:  # the library's own is no Exception
        return f"llguidance panicked: {panic}"
    return matcher.get_error() or matcher


def _consume(matcher: LLMatcher, token_ids: list[int], consuming: GrammarTime) -> str:
    """What is wrong, '' if nothing is."""
    began = time.process_time()
    if token_ids and not matcher.consume_tokens(token_ids):
        return matcher.get_error()
    return consuming.note(time.process_time() - began, len(token_ids))


if __name__ == "__main__":
    sys.exit(main())
