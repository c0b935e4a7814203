"""`quire chat`: a conversation at the terminal, or one answer to what is piped in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....ipc.errors import InputError, PromptError, RequestFailedError
from ..chat.commands import HELP, LEAVING, Commands
from ..chat.conversation import Conversation
from ..chat.line_editor import LineEditor, TypedLine, find_history
from ..engine_choice import add_engine_options, choose_model, read_engine_choice
from ..parser import ExitCode, Parser
from ..sampling_options import add_sampling_options, read_sampling_options
from ..streams import read_piped


def run(argv: Sequence[str]) -> int:
    """Run `quire chat`."""
    options = _make_parser().parse(argv)
    sampling = read_sampling_options(options)
    options.model = choose_model(argv, options.model_name, options.model)
    engine_args = read_engine_choice(options)
    message = _read_pipe() if options.quick is None else options.quick
    from ..session import Session

    with Session(engine_args, options.attach) as session:
        session.tokenizer.find_render_process().start()  # while the user types
        conversation = Conversation(session, sampling, options.system, options.verbose, options.think)
        if message is not None:
            conversation.answer(message)
            return ExitCode.OK
        return talk(conversation, find_history() if options.history else None)


def _read_pipe() -> str | None:
    """What is piped in, None at a terminal. Raises PromptError where there is neither text nor terminal."""
    if sys.stdin is not None and sys.stdin.isatty():  # pyright: ignore[reportUnnecessaryComparison]
        return None
    try:
        message = read_piped("message").strip()
    except UnicodeDecodeError as error:
        raise PromptError("message", error.object[error.start :][:20], "a text in UTF-8") from None
    if not message:
        raise PromptError("message", "", "a text piped in, or a terminal to chat at")
    return message


def _make_parser() -> Parser:
    parser = Parser(
        "quire chat",
        "Talk to a chat model. With a pipe: the whole of it is one message, and the answer is printed.",
        HELP,
        " [MODEL]",
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="as --model")
    chat: Any = parser.add_argument_group("chat options")
    chat.add_argument("-q", "--quick", metavar="TEXT", help="answer this and leave")
    chat.add_argument("--system", "--system-prompt", metavar="TEXT", help="the system message")
    text = "have the model think first, or not; default: as its chat template has it"
    chat.add_argument("--think", action=Parser.Switch, help=text)
    chat.add_argument("--verbose", action="store_true", help="tokens and rates after each answer, on stderr")
    text = "keep what is typed for the next chat, in chat_history in $XDG_STATE_HOME/quire"
    chat.add_argument("--history", action=Parser.Switch, default=True, help=text)
    sampling: Any = parser.add_argument_group(
        "sampling options", "Defaults: the model's own, else temperature 0; as long as the model goes on."
    )
    add_engine_options(parser)
    parser.set_defaults(log_level="WARNING")  # a text is not to be preceded by a table
    add_sampling_options(sampling)  # after the engine's, whose --seed it takes over
    return parser


def talk(conversation: Conversation, history: Path | None = None) -> int:
    """Talk with the user about a conversation; returns the exit code. Ctrl-D and /bye leave, Ctrl-C does not.

    history: the file that keeps what is typed; None: nothing does.
    """
    commands = Commands(conversation)
    editor = LineEditor(commands.words, history)
    print("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            typed = editor.read_message()
        except EOFError:
            print()
            return ExitCode.OK
        except KeyboardInterrupt:
            print("\nCtrl-D or /bye leaves")
            continue
        if not typed.is_quoted and typed.text in LEAVING:
            return ExitCode.OK
        _take(typed, conversation, commands)


def _take(typed: TypedLine, conversation: Conversation, commands: Commands) -> None:
    """Run a command or print an answer; what goes wrong is told, and the conversation goes on."""
    try:
        if typed.text.startswith("/") and not typed.is_quoted:
            commands.run(typed.text)
        elif typed.text:
            conversation.answer(typed.text)
    except PromptError as error:
        print(f"{error} (/clear starts anew)")
    except (InputError, RequestFailedError) as error:
        print(error)
    except KeyboardInterrupt:  # the second one while an answer does not move
        print("\nstopped; Ctrl-D or /bye leaves")
