"""`python -m quire.frontend.http.text_process`: one text process, started by a TextLane, never by hand.

One job at a time, each with a limit of processor time that the kernel keeps (SIGPROF ends the process): a
template or a pattern without end costs its own request, also when nobody is left to kill the process. A
limited address space makes what eats memory fail here. Ends with its socket.
"""

import contextlib
import gc
import socket
import sys
from collections.abc import Callable

from ....ipc.decoding import decode_msgpack
from ....ipc.processes.heap import trim_heap
from ....ipc.processes.process import EXIT_OK, Lifeline
from ....ipc.processes.process_limits import lower_priority
from ...text.bounded_jobs import FrameReader, limit_memory, limit_time, make_frame
from ...text.tokenizer import Tokenizer, load_tokenizer
from .jobs import Ready, TextArgs, decode_job, encode_body
from .work import do_job, prepare_job

_MAX_LOAD_S = 60.0  # of processor time
_NICENESS = 5  # a third of the processor beside others that want it
_RECEIVE_BYTES = 1 << 20


def main() -> int:
    """Answer jobs until the socket ends."""
    lifeline = Lifeline()
    args = decode_msgpack(lifeline.args, TextArgs)
    limit_memory()
    after_job: Callable[[], object] = bool
    if args.is_background:
        # A short job's limit is near; a long one shall not go on for a parent that is gone.
        lifeline.watch(0.0)
        lower_priority(_NICENESS)
        after_job = trim_heap
    with socket.socket(fileno=args.socket_fd) as jobs, contextlib.suppress(ConnectionError):
        limit_time(_MAX_LOAD_S)
        tokenizer = _load(args)
        limit_time(0.0)
        jobs.sendall(make_frame(encode_body(Ready())))
        _serve(jobs, tokenizer, after_job)
    return EXIT_OK


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
            limit_time(_MAX_LOAD_S)
            prepare_job(tokenizer, job)
            limit_time(limit_s)
            answer = make_frame(encode_body(do_job(tokenizer, job)))
            limit_time(0.0)
            jobs.sendall(answer)
            after_job()


sys.exit(main())
