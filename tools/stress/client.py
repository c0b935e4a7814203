"""A client process of a stress run: `python -P -m quire.tools.stress.client`.

Reads a ClientPlan, a line of JSON, and says "ready"; the next line starts the load. Then it writes each
request's Record, a line of JSON, when it has ended, at last what it has Sent, and ends with standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from abc import ABC, abstractmethod

import msgspec

from ...frontend.async_llm import AsyncLLM
from ...frontend.llm import LLM
from ...ipc.errors import EngineDeadError, QuireError
from ...ipc.params.sampling_params import RequestOutputKind
from ..bench.http_stream import Endpoint
from .answers import answer_all, encode_vector, join_beams
from .asks import Arrival, ClientPlan
from .background import ask_in_background
from .http_client import ask_http, make_client_context
from .record import Golden, Record, Sent

_SLOW_PAUSE_S = 0.05
_LLM_BATCH = 4  # requests of one call of LLM.generate


def write_line(data: bytes) -> None:
    """A line to whoever started this process."""
    sys.stdout.buffer.write(data + b"\n")
    sys.stdout.buffer.flush()


def make_record(plan: ClientPlan, arrival: Arrival) -> Record:
    """A record of a request that is sent now."""
    return Record(
        number=arrival.number,
        ask=arrival.ask,
        client=plan.kind,
        behaviour=arrival.behaviour,
        is_streamed=plan.kind in ("http", "async", "background") and plan.pool[arrival.ask].is_streamed,
        began_at=time.monotonic(),
    )


def write_record(record: Record) -> None:
    """The request has ended."""
    record.ended_at = time.monotonic()
    write_line(msgspec.json.encode(record))


class Client(ABC):
    """Sends a plan's requests when they are due, all in one event loop."""

    def __init__(self, plan: ClientPlan) -> None:
        self._plan = plan
        self._has_lost_engine = False

    async def run(self) -> None:
        """Get ready, wait for the word, and send everything."""
        await self.start()
        write_line(b"ready")
        if not await asyncio.to_thread(sys.stdin.buffer.readline):
            return  # whoever started this has gone
        await self._send_all()

    @abstractmethod
    async def start(self) -> None:
        """Connect, where that is done once for all requests."""

    @abstractmethod
    async def ask(self, arrival: Arrival, record: Record) -> None:
        """Send one request and fill its record. May raise QuireError or OSError, which the record gets."""

    async def _send_all(self) -> None:
        start = time.monotonic()
        numbers: list[int] = []
        stop = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.readline))
        limit = self._plan.max_concurrency
        slots = asyncio.Semaphore(len(self._plan.arrivals) + 1 if limit is None else limit)
        async with asyncio.TaskGroup() as group:
            for arrival in self._plan.list_arrivals():
                if limit is None:
                    await asyncio.sleep(max(0.0, start + arrival.due_s - time.monotonic()))
                await slots.acquire()
                if stop.done() or self._has_lost_engine:
                    slots.release()
                    break
                numbers.append(arrival.number)
                task = group.create_task(self._ask_in_time(arrival))
                task.add_done_callback(lambda _: slots.release())
        write_line(msgspec.json.encode(Sent(numbers)))

    async def _ask_in_time(self, arrival: Arrival) -> None:
        record = make_record(self._plan, arrival)
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                await self.ask(arrival, record)
        except TimeoutError:
            record.error = f"no end within {self._plan.timeout_s:g} s"
        except (QuireError, OSError) as error:
            record.error = f"{type(error).__name__}: {error}"
            # An endless plan would send thousands of requests a second from now on.
            self._has_lost_engine = self._plan.is_endless and isinstance(error, EngineDeadError)
        if record.error:
            record.end = "failed"
        write_record(record)


class ServerClient(Client):
    """What asks a server over HTTP, also in the background: each request over connections of its own."""

    async def start(self) -> None:
        self._tls = None if self._plan.ca_path is None else make_client_context(self._plan.ca_path)

    async def ask(self, arrival: Arrival, record: Record) -> None:
        plan, ask = self._plan, self._plan.pool[arrival.ask]
        endpoint = Endpoint.parse(plan.url, plan.api_key)
        leave_after = ask.max_tokens // 2 if arrival.behaviour == "leaves" else None
        how = (record, leave_after, _SLOW_PAUSE_S if arrival.behaviour == "slow" else 0.0, self._tls)
        if plan.kind == "background":
            await ask_in_background(endpoint, ask.make_response_body(plan.model), *how)
        else:
            await ask_http(endpoint, ask.path, ask.make_body(plan.model), *how)


class AsyncClient(Client):
    """Generators of one AsyncLLM."""

    async def start(self) -> None:
        self._llm = AsyncLLM(attach=self._plan.daemon)
        await self._llm.start()

    async def ask(self, arrival: Arrival, record: Record) -> None:
        ask = self._plan.pool[arrival.ask]
        if ask.beam_width is not None:
            found = await self._llm.beam_search(ask.engine_prompt, ask.make_search())
            record.take_whole(join_beams(ask, found))
            return
        if ask.embeds:
            async for vector in self._llm.encode(ask.engine_prompt, ask.pooling_params):
                record.take_whole(Golden([], encode_vector(vector.outputs.raw)))
            return
        stream = self._llm.generate(ask.engine_prompt, ask.make_params(RequestOutputKind.DELTA))
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                record.piece_times.append(time.monotonic())
                record.token_ids += output.outputs[0].token_ids
                record.text += output.outputs[0].text
                record.num_ends += output.finished
                record.error = output.error or ""
                if arrival.behaviour == "leaves" and len(record.token_ids) >= ask.max_tokens // 2:
                    break
                if arrival.behaviour == "slow":
                    await asyncio.sleep(_SLOW_PAUSE_S)
        record.num_tokens = len(record.token_ids)
        record.end = "finished" if record.num_ends else "left"


class GrpcClient(Client):
    """Whole answers of a server's gRPC API, each over a channel of its own."""

    async def start(self) -> None:
        from .grpc_client import GrpcEndpoint  # which needs an extra

        self._endpoint = GrpcEndpoint(self._plan.grpc_address, self._plan.ca_path)

    async def ask(self, arrival: Arrival, record: Record) -> None:
        await self._endpoint.ask(self._plan.pool[arrival.ask], record)


def run_llm(plan: ClientPlan) -> None:
    """Calls of LLM.generate, a few requests each, one call after another, until they raise."""
    with LLM(attach=plan.daemon) as llm:
        write_line(b"ready")
        if not sys.stdin.buffer.readline():
            return
        start = time.monotonic()
        numbers: list[int] = []
        arrivals = plan.list_arrivals()
        while batch := list(itertools.islice(arrivals, _LLM_BATCH)):
            if not plan.is_endless:
                time.sleep(max(0.0, start + batch[0].due_s - time.monotonic()))
            numbers += [arrival.number for arrival in batch]
            if not _run_batch(llm, plan, batch):
                break
        write_line(msgspec.json.encode(Sent(numbers)))


def _run_batch(llm: LLM, plan: ClientPlan, batch: list[Arrival]) -> bool:
    """False when the call has raised, for which each request gets a record too."""
    records = [make_record(plan, arrival) for arrival in batch]
    try:
        answers = answer_all(llm, [plan.pool[arrival.ask] for arrival in batch])
    except QuireError as error:
        for record in records:
            record.error = f"{type(error).__name__}: {error}"
            write_record(record)
        return False
    for record, answer in zip(records, answers, strict=True):
        if isinstance(answer, str):
            record.error = answer
        else:
            record.take_whole(answer)
        write_record(record)
    return True


def main() -> None:
    """Run the plan on standard input."""
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClientPlan)
    if plan.kind == "llm":
        run_llm(plan)
    else:
        kinds = {"async": AsyncClient, "grpc": GrpcClient}
        asyncio.run(kinds.get(plan.kind, ServerClient)(plan).run())


if __name__ == "__main__":
    main()
