"""The attacker process of a hostile run: `python -P -m quire.tools.stress.hostile.attacker`.

Reads an AttackPlan, a line of JSON, and says "ready"; the next line starts the attacks. After each turn it
writes a TurnReport, a line of JSON, and Played at last.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import sys
import threading
import time
from collections import Counter

import msgspec
import zmq

from ....ipc.errors import QuireError
from .attack import Play, sleep_until
from .attacks import ATTACKS
from .plan import AttackPlan, Played, Turn, TurnReport

_NICENESS = 10  # what it costs to attack must not be what the streams feel
_PAUSE_S = 0.25  # between two rounds: a flood of cheap requests is not what this is about
_write_lock = threading.Lock()


def _write(line: bytes) -> None:
    with _write_lock:
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


def _play_turn(play: Play, turn: Turn, start: float) -> None:
    """From its beginning to its end, round after round."""
    sleep_until(start + turn.begins_s)
    began_at, until = time.monotonic(), start + turn.ends_s
    answers: Counter[str] = Counter()
    error = ""
    try:
        while time.monotonic() < until:
            answers += play(until)
            sleep_until(min(time.monotonic() + _PAUSE_S, until))
    except (QuireError, OSError, zmq.ZMQError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    report = TurnReport(
        attack=turn.attack, began_at=began_at, ended_at=time.monotonic(), answers=dict(answers), error=error
    )
    _write(msgspec.json.encode(report))


def main() -> None:
    """Play the plan on standard input."""
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=AttackPlan)
    os.nice(_NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    names = dict.fromkeys(turn.attack for turn in plan.turns)
    attacks = {
        name: ATTACKS[name].prepare(plan.target, random.Random(f"{name}/{plan.seed}")) for name in names
    }
    _write(b"ready")
    if not sys.stdin.buffer.readline():
        return  # whoever started this has gone
    start = time.monotonic()
    threads = [
        threading.Thread(target=_play_turn, args=(attacks[turn.attack], turn, start), daemon=True)
        for turn in plan.turns
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _write(msgspec.json.encode(Played()))


if __name__ == "__main__":
    main()
