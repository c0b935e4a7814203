"""Who asks (Caller), and how much of what callers share each has taken (TenantUsage). Knows no requests."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from ...ipc.params.request_options import RequestOptions, read_options
from ...ipc.protocol.fair_share import has_room
from ...ipc.protocol.rights import CALLER_OPTIONS, Reach, Standing, find_reach

_HERE = "local"  # the address of who comes over loopback or a Unix socket
_NETWORK_BYTES = 8  # of an IPv6 address: one customer has the rest to choose from


class Caller(msgspec.Struct, frozen=True):
    """Who asks. `key_hash`: hex sha256 of the API key, '' without keys; then `server` and `address` say it.

    `server`: the ServerOptions.server_id; `request_id`: what the caller calls this request (X-Request-Id), ''
    if it did not say.
    """

    key_hash: str = ""
    address: str = ""
    request_id: str = ""
    server: str = ""
    is_stranger: bool = False  # without one of the server's keys

    def at(self, host: str) -> Caller:
        """The same where the address is known, which counts for callers without a key."""
        host = host.removeprefix("::ffff:")  # IPv4 on a socket for both
        is_here = host in ("", "::1") or host.startswith("127.")
        return msgspec.structs.replace(self, address=_HERE if is_here else name_address(host))

    @property
    def standing(self) -> Standing:
        """What kind of caller it is."""
        if self.is_stranger:
            return Standing.STRANGER
        return Standing.KEY if self.key_hash else Standing.KEYLESS

    @property
    def tenant(self) -> str:
        """The name under which the engine shares its time, and this process its room, among callers.

        Its requests are those with this tenant: it sees and ends no others.
        """
        return self.key_hash[:16] or f"{self.server}/{self.address or _HERE}"

    @property
    def owner(self) -> str:
        """Whose the responses are that are kept for it."""
        return self.key_hash or self.tenant

    def reaches(self, path: str) -> Reach:
        """Whose requests it sees, or ends, by a route or a method."""
        return find_reach(path, self.standing)

    def owns(self, owner: str) -> bool:
        """Whether a request with this tenant is its own."""
        return not self.is_stranger and owner == self.tenant

    def make_options(self, fields: object, *names: str) -> RequestOptions:
        """What a body says, and the server for it: whose the request is, and what aborts may call it.

        Callers share cached blocks with none but themselves: what is cached can be told by its speed. Those
        without a key on the server's own machine are its user, who shares them with all programs of theirs.
        """
        options = {name: getattr(fields, name, None) for name in CALLER_OPTIONS}
        options = {name: value for name, value in options.items() if value is not None}
        if self.key_hash or self.address not in ("", _HERE):
            salt = options.get("cache_salt", "")
            options["cache_salt"] = sha256(f"{self.owner}:{salt}".encode()).hexdigest()
        own_names = [name for name in (*names, self.request_id) if name]
        return read_options(**options, tenant=self.tenant, names=own_names)


def name_address(host: str) -> str:
    """The client that an address stands for: an IPv4 address, an IPv6 network of 64 bits, '' without one."""
    host = host.removeprefix("::ffff:")  # IPv4 on a socket for both
    if ":" not in host:
        return host
    try:
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:_NETWORK_BYTES].hex(":", 2)
    except OSError:
        return host


@dataclass(slots=True)
class _Taken:
    """What one tenant's requests take together."""

    num_requests: int = 0
    amount: int = 0


_NOTHING = _Taken()


class TenantUsage:
    """Who takes how much of one thing that tenants share. Knows those with requests inside, no others."""

    def __init__(self) -> None:
        self.amount = 0  # taken by all
        self._taken_by: dict[str, _Taken] = {}

    def find_amount(self, tenant: str) -> int:
        """What this tenant's requests take."""
        return self._taken_by.get(tenant, _NOTHING).amount

    def has_room(self, tenant: str, asked: int, bound: int) -> bool:
        """Whether `asked` may be taken by this tenant now, of `bound`: by ipc/protocol/fair_share.py."""
        share = 1 / (len(self._taken_by) + (tenant not in self._taken_by))
        return has_room(asked, self.amount, self.find_amount(tenant), bound, share)

    def enter(self, tenant: str, amount: int) -> None:
        """A request of this tenant's takes so much until it leaves."""
        taken = self._taken_by.setdefault(tenant, _Taken())
        taken.num_requests += 1
        taken.amount += amount
        self.amount += amount

    def leave(self, tenant: str, amount: int) -> None:
        """A request that has entered with this amount has ended."""
        taken = self._taken_by[tenant]
        taken.num_requests -= 1
        taken.amount -= amount
        self.amount -= amount
        if not taken.num_requests:
            del self._taken_by[tenant]
