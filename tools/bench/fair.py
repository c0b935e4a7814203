"""`quire bench fair`: what a flood by one client costs another one, in time to first token.

A daemon with default settings in a runtime folder of its own, and two clients in processes of their own. In
each round the light client is alone first and then beside the flood, so that a busy machine disturbs both.
"""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import msgspec

from ...ipc.errors import QuireError
from . import fair_client
from .fair_client import (
    Answer,
    Command,
    CountTokens,
    FirstTokens,
    MeasureFirstTokens,
    StartFlood,
    StopFlood,
    TokenCount,
)
from .machine import describe_machine, format_machine
from .private_daemon import run_private_daemon
from .table import format_rate, format_table

PROMPT_LENS = (64, 400)  # tokens, of the light client
_OUTPUT_LEN = 8
_FLOOD = StartFlood(num_requests=300, prompt_len=100, output_len=200)
_FLOOD_ALONE_S = 2.0  # how long the flood's rate without the light client is taken over
_ANSWER_TIMEOUT_S = 300.0
_NAME = "bench-fair"


class ClientProcess:
    """A fair_client process. One command at a time; every answer has a deadline."""

    def __init__(self, daemon_name: str) -> None:
        command = [sys.executable, "-P", "-m", fair_client.__name__, daemon_name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)

    def measure(self, num_requests: int, prompt_len: int) -> list[float]:
        """Seconds to the first token of each request."""
        answer = self._ask(MeasureFirstTokens(num_requests, prompt_len, _OUTPUT_LEN))
        assert isinstance(answer, FirstTokens)
        return answer.seconds

    def count(self, command: StartFlood | CountTokens | StopFlood) -> TokenCount:
        """The flood's tokens after `command`."""
        answer = self._ask(command)
        assert isinstance(answer, TokenCount)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate(timeout=_ANSWER_TIMEOUT_S)

    def _ask(self, command: Command) -> Answer:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(msgspec.json.encode(command) + b"\n")
        stdin.flush()
        if not select.select([stdout], [], [], _ANSWER_TIMEOUT_S)[0]:
            raise QuireError(f"a client did not answer within {_ANSWER_TIMEOUT_S:g} s")
        line = stdout.readline()
        if not line:
            raise QuireError("a client ended, see above")
        return self._decoder.decode(line)


@dataclass(slots=True)
class Effect:
    """What was seen with prompts of one length, over all rounds."""

    alone_s: list[float] = field(default_factory=list[float])
    flooded_s: list[float] = field(default_factory=list[float])

    @property
    def ratio(self) -> float:
        """How many times as long the median first token takes beside the flood."""
        return statistics.median(self.flooded_s) / statistics.median(self.alone_s)


@dataclass(slots=True)
class FloodRates:
    """Tokens/s of the flood in each round, and the cores that its own process used meanwhile."""

    alone: list[float] = field(default_factory=list[float])
    beside: list[float] = field(default_factory=list[float])
    cores: list[float] = field(default_factory=list[float])


def run_fair(num_rounds: int, num_requests: int, model: str) -> int:
    """Measure and print; returns 0."""
    print(format_machine(describe_machine()) + "\n")
    effects = {prompt_len: Effect() for prompt_len in PROMPT_LENS}
    rates = FloodRates()
    with run_private_daemon(_NAME, model), _run_client() as light, _run_client() as heavy:
        light.measure(2, PROMPT_LENS[0])
        for _ in range(num_rounds):
            _run_round(light, heavy, num_requests, effects, rates)
    print(_format_effects(effects))
    alone, beside = statistics.median(rates.alone), statistics.median(rates.beside)
    print(
        f"\nthe flood's tokens/s: {format_rate(alone)} without the light client, {format_rate(beside)} "
        f"with it ({beside / alone:.2f}x); its process used {statistics.median(rates.cores):.2f} cores"
    )
    print(
        f"{num_rounds} rounds of {num_requests} requests a row, {_OUTPUT_LEN} tokens each, one every "
        f"{fair_client.PERIOD_S:g} s; flood: always {_FLOOD.num_requests} requests of {_FLOOD.prompt_len} "
        f"tokens in, {_FLOOD.output_len} out; load after: {os.getloadavg()[0]:.2f}"
    )
    return 0


def _run_round(
    light: ClientProcess,
    heavy: ClientProcess,
    num_requests: int,
    effects: dict[int, Effect],
    rates: FloodRates,
) -> None:
    for prompt_len, effect in effects.items():
        effect.alone_s += light.measure(num_requests, prompt_len)
    first = heavy.count(_FLOOD)
    # The only wait for time: a rate needs a span.
    select.select([], [], [], _FLOOD_ALONE_S)
    begun = heavy.count(CountTokens())
    for prompt_len, effect in effects.items():
        effect.flooded_s += light.measure(num_requests, prompt_len)
    ended = heavy.count(CountTokens())
    heavy.count(StopFlood())
    rates.alone.append((begun.num_tokens - first.num_tokens) / (begun.at - first.at))
    rates.beside.append((ended.num_tokens - begun.num_tokens) / (ended.at - begun.at))
    rates.cores.append((ended.cpu_s - begun.cpu_s) / (ended.at - begun.at))


def _format_effects(effects: dict[int, Effect]) -> str:
    rows: list[list[str]] = []
    for prompt_len, effect in effects.items():
        figures = [*_format_times(effect.alone_s), *_format_times(effect.flooded_s)]
        rows.append([f"{prompt_len} prompt tokens", *figures, f"{effect.ratio:.2f}x"])
    header = ["time to first token, ms", "alone", "p90", "beside a flood", "p90", "medians"]
    return format_table(header, rows)


def _format_times(seconds: Sequence[float]) -> list[str]:
    ordered = sorted(seconds)
    p90 = ordered[int(0.9 * (len(ordered) - 1))]
    return [f"{statistics.median(ordered) * 1e3:.1f}", f"{p90 * 1e3:.1f}"]


@contextlib.contextmanager
def _run_client() -> Generator[ClientProcess]:
    client = ClientProcess(_NAME)
    try:
        yield client
    finally:
        client.close()
