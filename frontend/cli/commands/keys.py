"""`quire keys make|add`: the keys with which a daemon and its clients on the network know each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ....ipc.network.keys import CLIENT_SECRET, CLIENTS, SERVER_PUBLIC, add_client, make_keys
from ..parser import ExitCode, Parser, run_subcommand

_USAGE = f"""\
usage: quire keys COMMAND

Keys for frontends on other machines (CURVE).

commands:
  make DIR           make a daemon's keys and a first client's, in a new folder
  add DIR NEW_DIR    let one more client in, and make the folder for its machine

A daemon takes the folder: quire daemon start --listen tcp://HOST:PORT --keys DIR. A client needs of it
{CLIENT_SECRET} and {SERVER_PUBLIC}: copy these two (or move a NEW_DIR) to its machine, and give the folder
there: quire generate --attach tcp://HOST:PORT --keys FOLDER, LLM(attach="tcp://HOST:PORT", keys="FOLDER").
To lock a client out remove its line from DIR/{CLIENTS}: the file is read again when it changes. A line may
grant its client more, behind the name: weight=2 priority=-1 tenants=own.
"""


def run(argv: Sequence[str]) -> int:
    """Run `quire keys`."""
    return run_subcommand("quire keys", _USAGE, _COMMANDS, argv)


def _make(argv: Sequence[str]) -> int:
    parser = Parser("quire keys make", "Make a daemon's keys and a first client's.", arguments=" DIR")
    parser.add_argument("folder", metavar="DIR", help="a folder without keys; made if missing")
    folder = Path(parser.parse(argv).folder)
    make_keys(folder)
    print(f"{folder}: keys of a daemon and of a client; a client needs {CLIENT_SECRET} and {SERVER_PUBLIC}")
    return ExitCode.OK


def _add(argv: Sequence[str]) -> int:
    parser = Parser("quire keys add", "Let one more client in.", arguments=" DIR NEW_DIR")
    parser.add_argument("folder", metavar="DIR", help="the daemon's keys")
    parser.add_argument("client_folder", metavar="NEW_DIR", help="the client's; its last part is its name")
    text = "the client's share of the engine, beside 1 of other clients (1)"
    parser.add_argument("--weight", type=float, default=1.0, metavar="W", help=text)
    options = parser.parse(argv)
    client_folder = Path(options.client_folder)
    add_client(Path(options.folder), client_folder, options.weight)
    print(f"{client_folder}: keys of a client that is let in; move the folder to its machine")
    return ExitCode.OK


_COMMANDS = {"make": _make, "add": _add}
