"""`quire.frontend.text.render_process`: renders chat templates for a RenderProcess, not by hand.

One job at a time, within bounded_jobs' limits. Ends with its socket, or with its parent.
"""

import contextlib
import functools
import socket
import sys

from ...ipc.decoding import make_msgpack_decoder
from ...ipc.errors import InputError, PromptError, shorten
from ...ipc.processes.process import EXIT_OK, Lifeline
from .bounded_jobs import FrameReader, limit_memory, limit_time, make_frame
from .bounded_template import MEMORY_ALLOWED, Answer, Refused, Rendered, RenderJob, encode
from .chat_template import ChatTemplate

_decode = make_msgpack_decoder(RenderJob)
_RECEIVE_BYTES = 1 << 20


def main() -> int:
    """Answer jobs until the socket ends."""
    lifeline = Lifeline()
    limit_memory()
    reader = FrameReader()
    with socket.socket(fileno=int(lifeline.args)) as jobs, contextlib.suppress(ConnectionError):
        while data := jobs.recv(_RECEIVE_BYTES):
            for body, limit_s in reader.feed(data):
                limit_time(limit_s)
                answer = _answer(body)
                limit_time(0.0)
                jobs.sendall(make_frame(answer))
    return EXIT_OK


def _answer(body: bytes) -> bytes:
    job = _decode(body)
    try:
        return encode(_do(job))
    except InputError as error:
        if isinstance(error.__cause__, MemoryError):
            return encode(Refused("PromptError", error.field, None, MEMORY_ALLOWED))
        return _refuse(error)
    except MemoryError:
        return encode(Refused("PromptError", job.param, None, MEMORY_ALLOWED))
    except RecursionError:
        return _refuse(PromptError(job.param, "a conversation", "JSON of less depth"))
    except UnicodeEncodeError:
        return _refuse(PromptError(job.param, "a text", "text that UTF-8 can hold (no lone surrogates)"))


def _refuse(error: InputError) -> bytes:
    kind, field, allowed = type(error).__name__, error.field, error.allowed.encode(errors="replace").decode()
    try:
        return encode(Refused(kind, field, error.value, allowed))
    except (TypeError, ValueError, OverflowError, RecursionError):  # the value is none of JSON's
        return encode(Refused(kind, field, shorten(error.value), allowed))


def _do(job: RenderJob) -> Answer:
    source, tool_use, tokens = job.template.source, job.template.tool_use, job.template.special_tokens
    template = _find_template(source, tool_use, tuple(tokens.items()))
    if job.messages is None:
        template.check_syntax()
        return Rendered("")
    text = template.render(
        job.messages,
        job.add_generation_prompt,
        job.continue_final_message,
        job.variables,
        job.tools,
        job.param,
    )
    return Rendered(text)


@functools.lru_cache(maxsize=8)
def _find_template(source: str, tool_use: str | None, tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    named = dict(tokens)
    return ChatTemplate(source, named, None if tool_use is None else ChatTemplate(tool_use, named))


if __name__ == "__main__":
    sys.exit(main())
