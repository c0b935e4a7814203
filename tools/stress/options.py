"""Options of `quire stress`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from ...ipc.errors import InputError
from ...ipc.spec.weight_format import Quantization
from ..options import POSITIVE, Check, option
from .kills import METHODS, RAY_ROLES, ROLES, Method, Role

_SUPERVISOR = "supervisor"
_DURATION_S, _HOSTILE_DURATION_S = 60.0, 300.0


@dataclass(frozen=True, slots=True)
class Options:
    """Load and deaths together: does every request get its tokens?"""

    seed: int = option(0, "of the load and the kills (0)", metavar="N")
    duration: float | None = option(
        None, "of the load (60), of the attacks of --hostile (300)", POSITIVE, type=float, metavar="S"
    )
    rate: float = option(6.0, "requests/s, Poisson (6)", POSITIVE, metavar="R")
    max_tokens: int = option(200, "longest answer (200)", POSITIVE, metavar="N")
    kills: str | None = option(
        None,
        "who dies: core,worker,http,client and, at last, supervisor (all)",
        metavar="ROLES",
    )
    signals: str = option(
        "KILL,TERM,STOP,STOP+CONT", "with which signals (KILL,TERM,STOP,STOP+CONT)", metavar="HOW"
    )
    kill_interval: float = option(
        8.0, "one kill in each (8), later where the engine would give up", POSITIVE, metavar="S"
    )
    noise: bool = option(True, "storms of broken connections, and junk to every socket (on)")
    engines: int = option(1, "of its own daemon, any of which may die (1)", metavar="N")
    network: bool = option(False, "clients come to its own daemon over TCP, with keys")
    ssl: bool = option(
        False, "the server speaks TLS, with certificates that openssl makes and that are replaced meanwhile"
    )
    warm_spare: bool = option(False, "the engine keeps a spare for the next worker")
    tensor_parallel_size: int = option(
        1, "ranks of each stage of the engine, any of which may be the worker that is killed (1)", metavar="N"
    )
    distributed_executor_backend: str = option(
        "mp",
        "ray: its workers are on nodes of a Ray that this machine plays, where actor and node die too (mp)",
        choices=("mp", "ray"),
    )
    pipeline_parallel_size: int = option(1, "stages of the engine (1)", metavar="N")
    model: str = option("pocket", "of the engine: a folder or .gguf file (pocket)")
    quantization: str | None = option(
        None,
        "int4, int8 or fp8 of the engine's weights, while they are read (none)",
        choices=get_args(Quantization),
        metavar="FORMAT",
    )
    kv_cache_dtype: str = option(
        "auto",
        "of the engine's KV cache (auto)",
        choices=("auto", "int8", "fp8"),
        metavar="DTYPE",
    )
    reproduce: int | None = option(
        None, "N requests, one death of each kind, beside Dynamo's table", type=int, metavar="N"
    )
    hostile: bool = option(
        False, "nobody is killed: one key's attacks beside 16 ordinary streams of another key"
    )
    long_prompt: int | None = option(
        None,
        "nobody is killed: 16 streams beside which a prompt of N tokens comes in, under each policy",
        POSITIVE,
        type=int,
        metavar="N",
    )
    attacks: str | None = option(None, "which attacks --hostile plays (all)", metavar="NAMES")
    simulate: int | None = option(
        None,
        "no processes: N seeds of the simulator, whose messages are lost, late and doubled",
        Check(lambda value: value >= 1, "at least 1 seed"),
        type=int,
        metavar="N",
    )
    json: str | None = option(None, "write every figure to a file too", metavar="FILE")

    @property
    def duration_s(self) -> float:
        """Of the load or the attacks."""
        return self.duration or (_HOSTILE_DURATION_S if self.hostile else _DURATION_S)

    @property
    def has_ray(self) -> bool:
        """Whether its workers are on nodes of a Ray."""
        return self.distributed_executor_backend == "ray"

    @property
    def roles(self) -> tuple[Role, ...]:
        """Who is killed while the load runs. Raises InputError."""
        return tuple(name for name in self._list_victims() if name != _SUPERVISOR)

    @property
    def kills_supervisor(self) -> bool:
        """At last."""
        return _SUPERVISOR in self._list_victims()

    @property
    def methods(self) -> tuple[Method, ...]:
        """How they are killed. Raises InputError."""
        return parse_names("signals", self.signals, METHODS)

    @property
    def engine(self) -> dict[str, Any]:
        """Of its own engine, arguments by EngineArgs' names."""
        return {"data_parallel_size": self.engines} | {name: getattr(self, name) for name in ENGINE_FIELDS}

    def _list_victims(self) -> tuple[Any, ...]:
        allowed = (*ROLES, *(RAY_ROLES if self.has_ray else ()), _SUPERVISOR)
        return allowed if self.kills is None else parse_names("kills", self.kills, allowed)


ENGINE_FIELDS = ("tensor_parallel_size", "pipeline_parallel_size", "model", "quantization", "kv_cache_dtype")


def parse_names(field: str, text: str, allowed: tuple[Any, ...]) -> tuple[Any, ...]:
    """Names with commas between them; 'none' is no name."""
    names = () if text == "none" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in allowed:
            raise InputError(field, text, f"none, or of {', '.join(allowed)} with commas between them")
    return names
