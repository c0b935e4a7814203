"""The chat template that an operator gives in place of the model's: a file, or the text itself."""

from __future__ import annotations

from pathlib import Path

from ...ipc.errors import ConfigError, ModelError, PromptError
from ..models.model_files import MAX_TEMPLATE_BYTES

_OF_TEMPLATES = "{}\n"  # no path has them, each template has


def read_chosen_template(template: str) -> str:
    """The template's text. Raises ConfigError for an unreadable file, or a text that is no template."""
    text = template if any(letter in template for letter in _OF_TEMPLATES) else _read_file(template)
    if len(text.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        raise ConfigError("chat_template", template, f"at most {MAX_TEMPLATE_BYTES} bytes")
    from .bounded_template import BoundedTemplate, RenderProcess

    try:
        BoundedTemplate(RenderProcess(), text, {}).check_syntax()
    except (ModelError, PromptError) as error:
        raise ConfigError("chat_template", template, error.allowed) from None
    return text


def _read_file(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_TEMPLATE_BYTES + 1).decode().replace("\r\n", "\n")
    except OSError as error:
        allowed = f"a file that can be read, or the text of a template ({error.strerror})"
        raise ConfigError("chat_template", path, allowed) from None
    except UnicodeDecodeError as error:
        raise ConfigError("chat_template", path, f"UTF-8 text ({error})") from None
