"""`python -m quire.frontend.http.text_process`: one text process, started by a TextLane, never by hand.

One job at a time, each with a limit of processor time that the kernel keeps (SIGPROF ends the process): a
template or a pattern without end costs its own request, also when nobody is left to kill the process. A
limited address space makes what eats memory fail here. Ends with its socket.
"""

import contextlib
import gc
import resource
import signal
import socket
import sys
from collections.abc import Callable

from ....ipc.decoding import decode_msgpack
from ....ipc.processes.heap import trim_heap
from ....ipc.processes.process import EXIT_OK, Lifeline
from ....ipc.processes.process_limits import lower_priority
from ...text.tokenizer import Tokenizer, load_tokenizer
from ..limits import MAX_TEXT_MEMORY_BYTES
from .jobs import FrameReader, Ready, TextArgs, decode_job, encode_body, make_frame
from .work import do_job, prepare_job

_MAX_LOAD_S = 60.0  # of processor time
_NICENESS = 5  # a third of the processor beside others that want it
_RECEIVE_BYTES = 1 << 20


def main() -> int:
    """Answer jobs until the socket ends."""
    lifeline = Lifeline()
    args = decode_msgpack(lifeline.args, TextArgs)
    _limit_memory()
    after_job: Callable[[], object] = bool
    if args.is_background:
        # A short job's limit is near; a long one shall not go on for a parent that is gone.
        lifeline.watch(0.0)
        lower_priority(_NICENESS)
        after_job = trim_heap
    with socket.socket(fileno=args.socket_fd) as jobs, contextlib.suppress(ConnectionError):
        _set_time_limit(_MAX_LOAD_S)
        tokenizer = _load(args)
        _set_time_limit(0.0)
        jobs.sendall(make_frame(encode_body(Ready())))
        _serve(jobs, tokenizer, after_job)
    return EXIT_OK


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_TEXT_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_TEXT_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load(args: TextArgs) -> Tokenizer:
    """With Jinja, whose import takes longer than most jobs; a template is compiled within a job's limits."""
    tokenizer = load_tokenizer(args.tokenizer, args.chat_template)
    _ = tokenizer.chat_template
    gc.collect()
    gc.freeze()
    return tokenizer


def _serve(jobs: socket.socket, tokenizer: Tokenizer, after_job: Callable[[], object]) -> None:
    reader = FrameReader()
    while data := jobs.recv(_RECEIVE_BYTES):
        for body, limit_s in reader.feed(data):
            job = decode_job(body)
            _set_time_limit(_MAX_LOAD_S)
            prepare_job(tokenizer, job)
            _set_time_limit(limit_s)
            answer = make_frame(encode_body(do_job(tokenizer, job)))
            _set_time_limit(0.0)
            jobs.sendall(answer)
            after_job()


def _set_time_limit(limit_s: float) -> None:
    """Processor time of this process from now on, after which SIGPROF ends it; 0.0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)


sys.exit(main())
