"""TextProcess: the HTTP process's end of one text process. Knows frames, and neither jobs nor turns."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from ....ipc.processes.process import ChildProcess
from .jobs import FrameReader, TextArgs

TEXT_MODULE = "quire.frontend.openai.text"
# One thread a process is what its limits are for: threads would reserve address space and hide from the nice.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"}
_MEMORY_EXITS = (-signal.SIGABRT, -signal.SIGSEGV)  # a failed allocation in native code; a deep recursion


class TextProcess(asyncio.Protocol):
    """One text process, which is started by the constructor (a millisecond; OSError when it cannot be).

    on_body is given the body of each frame that it sends, of which the first says that it is ready; on_end is
    called once, when it has ended. Both in the event loop, and not after `close`.
    """

    def __init__(
        self,
        tokenizer: str,
        chat_template: str | None,
        is_background: bool,
        on_body: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_body = on_body
        self._on_end = on_end
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._socket, its_end = socket.socketpair()
        args = TextArgs(
            tokenizer=tokenizer,
            chat_template=chat_template,
            socket_fd=its_end.fileno(),
            is_background=is_background,
        )
        payload = msgspec.msgpack.encode(args)
        try:
            with its_end:
                fds = (args.socket_fd,)
                self._child = ChildProcess.start(TEXT_MODULE, "text", payload, _ENVIRONMENT, pass_fds=fds)
        except BaseException:
            self._socket.close()
            raise
        loop = asyncio.get_running_loop()
        loop.add_reader(self._child.pid_fd, self._end)
        self._connecting = asyncio.ensure_future(self._connect(loop))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def was_out_of_time(self) -> bool:
        """Whether its own limit of processor time has ended it."""
        return self._child.exit_code == -signal.SIGPROF

    @property
    def was_out_of_memory(self) -> bool:
        """Whether it ended as one does that is refused memory where nothing can catch that."""
        return self._child.exit_code in _MEMORY_EXITS

    def describe_exit(self) -> str:
        """How it ended."""
        return self._child.describe_exit()

    def send(self, frame: bytes) -> None:
        """Hand it a job; only after it has said that it is ready."""
        assert self._transport is not None
        self._transport.write(frame)

    def kill(self, because: str) -> None:
        """SIGKILL; on_end is called when it has ended."""
        self._child.kill(because)

    def close(self) -> None:
        """End it at once. Idempotent."""
        if self._child.pid_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._child.pid_fd)
        self._child.kill("its server ends")
        self._child.stop(0.0)
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._socket.close()

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        self._socket.setblocking(False)
        await loop.create_unix_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body, _ in self._frames.feed(data):
            self._on_body(body)

    def _end(self) -> None:
        self.close()
        self._on_end()
