"""RemoteOrigin: what the core believes of clients of other machines, and what it tells them.

network_listener.py has the sockets, ipc/protocol/rights.py the table of rights.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.daemon.daemon_state import SUPERVISOR_ROLE
from ...ipc.errors import DaemonError
from ...ipc.files.file_identity import check_served
from ...ipc.network.keys import AuthorizedClients, ClientGrant
from ...ipc.network.served_files import ServedFiles, hash_served_files
from ...ipc.params.request_options import RequestOptions
from ...ipc.processes.child_args import NetworkArgs
from ...ipc.protocol.engine_views import hide_others, hide_stall
from ...ipc.protocol.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineFacts,
    Hello,
    Refusal,
    UtilityMethod,
    UtilityResult,
)
from ...ipc.protocol.rights import REQUEST_OPTIONS, UTILITIES, Reach, Standing
from ...ipc.spec.config import ModelConfig
from ..clients.origin import Origin, find_key, make_owner_test, name_scope, scope_salt
from ..scheduling.tenant import ClientShare
from .network_listener import NetworkListener, find_max_unread_bytes
from .request_memory import RequestMemory

_log = logging.getLogger(__name__)

_LINGER_MS = 200


class RemoteClients:
    """What an engine's remote clients share. ClientRegistry calls `find_origin`."""

    def __init__(self, find_grant: Callable[[bytes], ClientGrant | None], memory: RequestMemory) -> None:
        """find_grant: the operator's grant to a client with this key; None: it is not let in any more."""
        self.find_grant = find_grant
        self.memory = memory
        self.files: ServedFiles | None = None  # of the model

    def find_origin(self, identity: bytes) -> RemoteOrigin:
        """The origin of a client with this identity."""
        return RemoteOrigin(identity, self)

    def note_files(self, model: ModelConfig) -> None:
        """Hash the model's files, to compare with clients' copies. Raises ModelError if they have changed
        since the daemon was started.
        """
        folders = model.model, model.tokenizer
        check_served(model.noted, *folders)
        self.files = hash_served_files(*folders)


def open_network(
    args: NetworkArgs, journal_path: str, max_frame_bytes: int
) -> tuple[NetworkListener, RemoteClients]:
    """Listen for the clients that the file in the daemon's folder names."""
    find_grant = AuthorizedClients(Path(args.keys)).find_grant
    listener = NetworkListener(
        args.listening_fd,
        args.server,
        find_grant,
        max_frame_bytes=max_frame_bytes,
        linger_ms=_LINGER_MS,
        max_unread_bytes=find_max_unread_bytes(),
    )
    _log.info("clients of other machines come to port %d", listener.port)
    memory = RequestMemory(f"{journal_path}.live" if journal_path else "")
    return listener, RemoteClients(find_grant, memory)


class RemoteOrigin(Origin):
    """A remote client's, by its key."""

    standing = Standing.NETWORK

    def __init__(self, identity: bytes, clients: RemoteClients) -> None:
        self.scope = name_scope(identity)
        self._identity = identity
        self._clients = clients

    def adapt_hello(self, hello: Hello) -> Hello:
        """With the weight of its key."""
        if hello.client_kind == SUPERVISOR_ROLE:
            raise DaemonError(f"a client of the network may not be the {SUPERVISOR_ROLE}")
        return msgspec.structs.replace(hello, weight=self._grant.weight)

    def find_share(self, hello: Hello) -> ClientShare:
        tenant = None if self._grant.may_name_tenants else self.scope
        return ClientShare(hello.weight, tenant, is_bounded=True)

    def adapt_facts(self, facts: EngineFacts) -> EngineFacts:
        """Without paths of this machine, with what the files there hold."""
        return msgspec.structs.replace(
            facts,
            model="remote",
            tokenizer="remote" if facts.tokenizer else "",
            weight_file=os.path.basename(facts.weight_file),
            noted=None,
            files=self._clients.files,
        )

    def adapt_request(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The fields that rights.py does not take from a remote client are its key's, or the core's own.

        An option without a row there keeps its default, whatever the client says.
        """
        past, grant = self._clients.memory.find(self.scope, request.request_id), self._grant
        asked = request.options
        options = RequestOptions(
            **{name: getattr(asked, name) for name, right in REQUEST_OPTIONS.items() if right.is_taken},
            priority=max(asked.priority, grant.priority),
            cache_salt=scope_salt(asked.cache_salt, self.scope),
            tenant=self.scope + asked.tenant,
        )
        return msgspec.structs.replace(
            request,
            # With an infinite arrival_time the core takes its own clock, less the age.
            arrival_time=math.inf if past.arrival is None else past.arrival,
            age_s=0.0,
            options=options,
            num_attempts=min(request.num_attempts, past.num_attempts),
        )

    def adapt_result(self, method: UtilityMethod, result: UtilityResult, /) -> UtilityResult:
        """Without others' requests; a digest was made without them."""
        if UTILITIES[method].find(Standing.NETWORK) is not Reach.OWN:
            return result
        owns = make_owner_test(self.scope)
        values: dict[str, Any] = {}
        if result.stats is not None:
            values["stats"] = hide_stall(result.stats, owns)
        if result.metrics is not None:
            values["metrics"] = msgspec.structs.replace(
                result.metrics, stats=hide_stall(result.metrics.stats, owns)
            )
        if result.snapshot is not None:
            values["snapshot"] = hide_others(result.snapshot, owns)
        if method is UtilityMethod.CHECK_INTEGRITY and result.error is not None:
            values["error"] = "there are problems, which clients on the engine's machine are told"
        return msgspec.structs.replace(result, **values)

    def adapt_told(self, message: msgspec.Struct) -> msgspec.Struct:
        """Texts without this machine's folders: causes name files."""
        match message:
            case Refusal(reason=reason) | EngineDead(reason=reason):
                return msgspec.structs.replace(message, reason=hide_folders(reason))
            case UtilityResult(error=str(error)):
                return msgspec.structs.replace(message, error=hide_folders(error))
            case EngineCoreOutputs(outputs=outputs) if any(output.error for output in outputs):
                return msgspec.structs.replace(message, outputs=[_hide_error(output) for output in outputs])
            case _:
                return message

    def note_added(self, request_id: str, queued_time: float) -> None:
        self._clients.memory.add(self.scope, request_id, queued_time)

    def note_ended(self, request_id: str) -> None:
        self._clients.memory.end(self.scope, request_id)

    def note_lost(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._clients.memory.lose(self.scope, request_id)

    @property
    def _grant(self) -> ClientGrant:
        """Asked anew each time: the operator may have changed it."""
        return self._clients.find_grant(find_key(self._identity)) or ClientGrant()


_FOLDERS = re.compile(r"""(?<=['"])/[^'"\n]*/|(?<![\w:/.])~?/(?:[^\s'",:;()/]+/)+""")


def hide_folders(text: str) -> str:
    """The text with names of files in the place of their paths."""
    return _FOLDERS.sub("", text)


def _hide_error(output: EngineCoreOutput) -> EngineCoreOutput:
    if output.error is None:
        return output
    return msgspec.structs.replace(output, error=hide_folders(output.error))
