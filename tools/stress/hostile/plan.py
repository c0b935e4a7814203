"""What the attacker process is to do and what it reports, and when which attack has its turn. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

_MIN_ALONE_S = 1.5  # a turn shorter than this shows little


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What is attacked: a server with keys over a daemon, which also serves the attackers' other ways in."""

    host: str
    port: int
    api_key: str  # the attackers' own
    model: str
    daemon: str
    supervisor_pid: int
    server_pid: int
    grpc_address: str = ""  # HOST:PORT; empty without gRPC
    network_address: str = ""  # where the daemon listens for clients of other machines
    network_keys: str = ""  # the folder of the attackers' key there
    keyless_port: int = 0  # of a server without keys over the same daemon
    scale: float = 1.0  # of sizes and counts

    def shrink(self, size: int) -> int:
        """A size or count at this run's scale, at least 1."""
        return max(1, int(size * self.scale))


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One attack's time, in seconds from the start of the attacks."""

    attack: str
    begins_s: float
    ends_s: float


class AttackPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that the attacker process is to do. Written to its standard input as one line of JSON."""

    target: Target
    seed: int
    turns: list[Turn]


class TurnReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How an attack was answered. Times are time.monotonic, which processes of a machine share.

    answers: HTTP statuses, or words that the attack explains -> how often. error: why it could not be played.
    """

    attack: str
    began_at: float
    ended_at: float
    answers: dict[str, int]
    error: str = ""


class Played(msgspec.Struct, frozen=True, tag=True):
    """The attacker's last words."""


def draw_turns(seed: int, attacks: Sequence[str], duration_s: float) -> list[Turn]:
    """Each attack alone in the first half, in a drawn order; in the second two at a time, in drawn pairs.

    A run too short for that plays each of them once.
    """
    rng = random.Random(f"turns/{seed}")
    turn_s = duration_s / (2 * len(attacks))
    if turn_s < _MIN_ALONE_S:
        return _draw_lane(rng, attacks, 0.0, duration_s)
    half_s = duration_s / 2
    lanes = [_draw_lane(rng, attacks, half_s, half_s) for _ in range(2)]
    return [*_draw_lane(rng, attacks, 0.0, half_s), *lanes[0], *lanes[1]]


def _draw_lane(rng: random.Random, attacks: Sequence[str], begins_s: float, length_s: float) -> list[Turn]:
    order, turn_s = rng.sample(attacks, len(attacks)), length_s / len(attacks)
    return [
        Turn(attack=attack, begins_s=begins_s + place * turn_s, ends_s=begins_s + (place + 1) * turn_s)
        for place, attack in enumerate(order)
    ]
