"""The prompt of `quire chat`: reads messages and commands until the user leaves."""

from __future__ import annotations

from ....ipc.errors import InputError, PromptError, RequestFailedError
from ..exit_codes import ExitCode
from .commands import LEAVING, Commands
from .conversation import Conversation
from .line_editor import LineEditor, Typed
from .line_history import LineHistory


class Terminal:
    """Talks with the user about one conversation."""

    def __init__(
        self, conversation: Conversation, history: LineHistory | None = None, has_color: bool = False
    ) -> None:
        """history: None keeps nothing of what is typed."""
        self._conversation = conversation
        self._commands = Commands(conversation)
        self._history = history
        self._has_color = has_color

    def run(self) -> int:
        """The loop; returns the exit code. Ctrl-D and /bye leave, Ctrl-C does not."""
        editor = LineEditor(self._commands.complete, self._history, self._has_color)
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
            self._take(typed)

    def _take(self, typed: Typed) -> None:
        """Run a command or print an answer; what goes wrong is told, and the conversation goes on."""
        try:
            if typed.text.startswith("/") and not typed.is_quoted:
                self._commands.run(typed.text)
            elif typed.text:
                self._conversation.answer(typed.text)
        except PromptError as error:
            print(f"{error} (/clear starts anew)")
        except (InputError, RequestFailedError) as error:
            print(error)
        except KeyboardInterrupt:  # the second one while an answer does not move
            print("\nstopped; Ctrl-D or /bye leaves")
