"""Every attack by its name."""

from __future__ import annotations

import random

from .attack import Attack
from .behind import JunkBehind
from .bodies import REQUESTS, RequestAttack
from .files import ReplacedFile
from .grammars import AmbiguousRows, BadGrammars, DearGrammars, ExplodingMasks, FailingRows, HeavyMasks
from .grpc_calls import GrpcConnections, GrpcStrangers
from .machine import Calls, CoreConnections, DeletedFiles, FullDisk, Junk
from .others import KeylessNeighbour, NetworkClient
from .plan import Target
from .streams import (
    EndlessChunks,
    EndlessExtension,
    EndlessHeader,
    EndlessHeaders,
    EndlessLine,
    EndlessTrailer,
    EndlessTrailers,
    Silence,
    SlowBodies,
    SlowHeads,
    SlowReaders,
    StrangersBodies,
    UnfinishedBodies,
    Upgrade,
)

_CLASSES: dict[str, type[Attack]] = {
    "endless-trailer": EndlessTrailer,
    "endless-trailers": EndlessTrailers,
    "endless-extension": EndlessExtension,
    "endless-chunks": EndlessChunks,
    "endless-header": EndlessHeader,
    "endless-headers": EndlessHeaders,
    "endless-line": EndlessLine,
    "strangers-bodies": StrangersBodies,
    "unfinished-bodies": UnfinishedBodies,
    "silence": Silence,
    "slow-heads": SlowHeads,
    "slow-bodies": SlowBodies,
    "slow-readers": SlowReaders,
    "upgrade": Upgrade,
    "dear-grammars": DearGrammars,
    "bad-grammars": BadGrammars,
    "heavy-masks": HeavyMasks,
    "exploding-masks": ExplodingMasks,
    "ambiguous-rows": AmbiguousRows,
    "failing-rows": FailingRows,
    "grpc-connections": GrpcConnections,
    "grpc-strangers": GrpcStrangers,
    "junk": Junk,
    "junk-behind": JunkBehind,
    "calls": Calls,
    "core-connections": CoreConnections,
    "network-client": NetworkClient,
    "keyless-neighbour": KeylessNeighbour,
    "deleted-files": DeletedFiles,
    "full-disk": FullDisk,
    "replaced-file": ReplacedFile,
}
ATTACKS: tuple[str, ...] = (*_CLASSES, *REQUESTS)


def make_attack(name: str, target: Target, rng: random.Random) -> Attack:
    """One of ATTACKS, with what it sends made ready."""
    if name in REQUESTS:
        return RequestAttack(target, rng, REQUESTS[name])
    return _CLASSES[name](target, rng)


def find_allowed(name: str) -> frozenset[str]:
    """The answers that it may get."""
    return RequestAttack.allowed if name in REQUESTS else _CLASSES[name].allowed
