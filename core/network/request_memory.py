"""RequestMemory: when remote clients' requests came, and how many cores have died with them live.

A remote client is not believed about either, as its requests would go before others, or run alone. So the
core notes each request that it admits in a file, 17 bytes a request, which the next core reads. Requests that
are lost with their connection stay in memory, as they come again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger(__name__)

_RECORD = struct.Struct("<8sdB")  # name (zeros: no request), arrival, how many cores have died with it live
_EMPTY = bytes(_RECORD.size)
_MAX_READ = 65536  # records of an earlier core
_KEEP_S = 60.0  # how long a request keeps its place in the queue; clients connect again within seconds
_MAX_LOST = 4096  # requests that are remembered although they are not live
_MAX_ENDS = 255


@dataclass(frozen=True, slots=True)
class RequestHistory:
    """What is known of a request that comes. `arrival`: wall clock; None: it was not here before."""

    arrival: float | None = None
    num_attempts: int = 0


_NEW = RequestHistory()


class RequestMemory:
    """One core's memory. The next core reads `path`; '' writes no file."""

    def __init__(self, path: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._past: OrderedDict[bytes, RequestHistory] = OrderedDict()  # not live; the oldest first
        self._lost_at: dict[bytes, float] = {}  # when this core has lost a request
        self._clock = clock
        self._began_at: float | None = None  # when the first request came
        self._live: dict[bytes, tuple[int, RequestHistory]] = {}  # name -> its place in the file
        self._free: list[int] = []
        self._num_places = 0
        self._fd = -1
        self._path = path
        if path:
            self._read()

    def find(self, scope: str, request_id: str) -> RequestHistory:
        """What is known of a request that comes now; nothing if it was away for over _KEEP_S.

        Time that it was away, while the core was there, does not count as waited.
        """
        name, now = _name(scope, request_id), self._clock()
        if self._began_at is None:
            self._began_at = now
        past, lost_at = self._past.get(name, _NEW), self._lost_at.get(name)
        if now - (self._began_at if lost_at is None else lost_at) > _KEEP_S:
            return _NEW
        if lost_at is None or past.arrival is None:
            return past
        return RequestHistory(past.arrival + (now - lost_at), past.num_attempts)

    def add(self, scope: str, request_id: str, arrival: float) -> None:
        """The request is live from now on."""
        name = _name(scope, request_id)
        past = self.find(scope, request_id)
        self._past.pop(name, None)
        self._lost_at.pop(name, None)
        life = RequestHistory(past.arrival if past.arrival is not None else arrival, past.num_attempts)
        if self._free:
            place = self._free.pop()
        else:
            place, self._num_places = self._num_places, self._num_places + 1
        self._live[name] = place, life
        self._write(place, _RECORD.pack(name, life.arrival, life.num_attempts))

    def end(self, scope: str, request_id: str) -> None:
        """Forget a request that was answered, if it is live."""
        self._take_out(_name(scope, request_id))

    def lose(self, scope: str, request_id: str) -> None:
        """The request's client is gone, and may bring it again."""
        name = _name(scope, request_id)
        if (life := self._take_out(name)) is not None:
            self._past[name], self._lost_at[name] = life, self._clock()
            if len(self._lost_at) > _MAX_LOST:
                first = next(iter(self._lost_at))
                del self._lost_at[first], self._past[first]

    def close(self) -> None:
        """Remove the file: the core ends in good order."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _take_out(self, name: bytes) -> RequestHistory | None:
        if (live := self._live.pop(name, None)) is None:
            return None
        place, life = live
        self._free.append(place)
        self._write(place, _EMPTY)
        return life

    def _read(self) -> None:
        """Read what the last core has left: its live requests, which were lost with it."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            data = file.read(_MAX_READ * _RECORD.size)
            whole = len(data) - len(data) % _RECORD.size
            for name, arrival, num_ends in _RECORD.iter_unpack(data[:whole]):
                if any(name):
                    self._past[name] = RequestHistory(arrival, min(num_ends + 1, _MAX_ENDS))
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)

    def _write(self, place: int, record: bytes) -> None:
        if not self._path:
            return
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.pwrite(self._fd, record, place * _RECORD.size)
        except OSError as error:
            _log.warning("%s not written: %s", self._path, error)
            self._path = ""


def _name(scope: str, request_id: str) -> bytes:
    text = f"{scope}{request_id}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8, person=b"request").digest()
