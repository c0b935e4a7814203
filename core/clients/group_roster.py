"""GroupRoster: which engines there are beside this one, as the owner of the group says."""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.errors import ProtocolError
from ...ipc.messages import EngineRoster


@dataclass(slots=True)
class GroupRoster:
    """`index` is this engine's own number; `owner` is the identity of the socket that may change `roster`.

    The identity is random and known to the two processes alone: what a client says that it is does not count.
    """

    index: int = 0
    roster: EngineRoster | None = None  # None: there is no other engine
    owner: bytes = b""

    def take(self, sender: bytes, roster: EngineRoster) -> bool:
        """Take a roster in; whether it is another one. Raises ProtocolError if somebody else has sent it."""
        if not self.owner or sender != self.owner:
            raise ProtocolError("EngineRoster is taken from the supervisor only")
        has_changed = roster != self.roster
        self.roster = roster
        return has_changed
