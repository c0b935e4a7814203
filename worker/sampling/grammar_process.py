"""`python -m quire.worker.sampling.grammar_process`: follows grammars that may take long, for a worker.

It loads the tokenizer's trie and forks a process for each such row, so that a row can be ended within a
native call, by a limit of processor time that the kernel keeps (SIGPROF) or by its worker, and costs no
other. Started and spoken to by GrammarProcess (grammar_child.py), never by hand; ends with its socket. No
torch, no numpy, and no thread: what forks has one.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...ipc.processes.process import EXIT_OK, Lifeline
from ...ipc.structured_outputs import COMPILE_S, GrammarTime, find_replay_limit_s, make_timed_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# To a row's process: processor seconds of a mask, bytes of the grammar (with the first only), tokens.
REQUEST = struct.Struct("<dII")
# Its answer: one of the next line, processor time in us of all and of what limits the next mask, bytes of the
# mask or of the error.
ANSWER = struct.Struct("<BQQI")
MASK, ENDING_MASK, ERROR = range(3)  # ENDING_MASK: the output may end here
PID = struct.Struct("<i")  # of a row's process that is to be reaped; negative: nobody asks how it ended
END = struct.Struct("<iQ")  # exit code, processor time in us since it began
MAX_MEMORY_BYTES = 512 << 20  # of a row's process beyond the trie


class GrammarProcessArgs(msgspec.Struct, array_like=True, frozen=True):
    """What the process is told at its start."""

    tokenizer: str  # tokenizer.json
    vocab_size: int
    eos_token_ids: list[int]
    socket_fd: int


def main() -> int:
    """Fork a process for each socket that comes, and reap those that are named."""
    lifeline = Lifeline()
    args = msgspec.msgpack.decode(lifeline.args, type=GrammarProcessArgs)
    tokenizer = _load(args)
    _limit_memory()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=args.socket_fd) as control:
        while True:
            data, fds, _, _ = socket.recv_fds(control, PID.size, 1)
            if not data:
                return EXIT_OK
            if fds:
                control.send(PID.pack(_fork(control, fds[0], tokenizer, lifeline.fd)))
                continue
            (pid,) = PID.unpack(data)
            _, status, usage = os.wait4(abs(pid), 0)
            if pid > 0:
                work_us = int((usage.ru_utime + usage.ru_stime) * 1e6)
                control.send(END.pack(os.waitstatus_to_exitcode(status), work_us))


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


def _fork(control: socket.socket, fd: int, tokenizer: LLTokenizer, lifeline_fd: int) -> int:
    """The pid of a process that follows a grammar; 0 if there can be none."""
    try:
        pid = os.fork()
    except OSError:
        pid = 0
    else:
        if pid == 0:
            control.close()
            os.close(lifeline_fd)
            with socket.socket(fileno=fd) as row:
                _follow(row, tokenizer)
            os._exit(EXIT_OK)
    os.close(fd)
    return pid


def _follow(row: socket.socket, tokenizer: LLTokenizer) -> None:
    """Answer one row's requests until its worker leaves."""
    words = -(-tokenizer.vocab_size // 32)
    mask = bytearray(4 * words)
    address = ctypes.addressof((ctypes.c_char * len(mask)).from_buffer(mask))
    matcher: LLMatcher | None = None
    consuming = GrammarTime()
    requests = row.makefile("rb")
    try:
        while len(header := requests.read(REQUEST.size)) == REQUEST.size:
            limit_s, num_text, num_tokens = REQUEST.unpack(header)
            text, packed = requests.read(num_text).decode(), requests.read(4 * num_tokens)
            began = counted = time.process_time()
            try:
                if matcher is None:
                    _limit_time(COMPILE_S + find_replay_limit_s(num_tokens))
                    matcher = _compile(tokenizer, text)
                else:
                    _limit_time(limit_s)
                error = _consume(matcher, list(memoryview(packed).cast("i")), consuming)
                if text:
                    _limit_time(limit_s)
                    counted = time.process_time()
                if not error:
                    matcher.unsafe_compute_mask_ptr(address, len(mask))
                    error = matcher.get_error() if matcher.is_error() else ""
            except BaseException as panic:  # the library's own, no Exception
                error = f"llguidance panicked: {panic}"
            _limit_time(0.0)
            ended = time.process_time()
            body = error.encode() if error else bytes(mask)
            kind = ERROR if error else ENDING_MASK if matcher and matcher.is_accepting() else MASK
            work_us, mask_us = (int((ended - since) * 1e6) for since in (began, counted))
            row.sendall(ANSWER.pack(kind, work_us, mask_us, len(body)) + body)
    except OSError:  # the worker is gone
        pass


def _limit_time(limit_s: float) -> None:
    """Processor time from now on, after which the process is ended; 0.0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)


def _compile(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Time is what bounds masks here."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**make_timed_limits(), verbose_errors=False)
    return LLMatcher(tokenizer, text, log_level=0, limits=limits)


def _consume(matcher: LLMatcher, token_ids: list[int], consuming: GrammarTime) -> str:
    """What is wrong, '' if nothing is."""
    if matcher.is_error():
        return matcher.get_error()
    began = time.process_time()
    if token_ids and not matcher.consume_tokens(token_ids):
        return matcher.get_error()
    return consuming.note(time.process_time() - began, len(token_ids))


if __name__ == "__main__":
    sys.exit(main())
