"""A request for each route (examples.json), and what servers of the package's two models have answered."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

_ANSWERS = Path(__file__).parent / "answers.json"
_UNASKED = (  # what has no end, nothing left to end, no model in the package that can do it, or is pages long
    "GET /stats/stream",
    "POST /v1/responses/{response_id}/cancel",
    "POST /classify",
    "GET /server_info",
    "GET /stats",
    "GET /stats/history",
    "GET /tokenizer_info",
)
_PORTS = (8000, 8001)  # of the model that generates, and of the one that embeds
_MAX_NUMBERS = 3  # of a list of them
_MAX_TEXT = 160
_MAX_LINES = 12  # of an answer that is no JSON


class Example(NamedTuple):
    """A request. `asked`: the path where it has parts to fill in; `port`: of the server that can answer."""

    method: str
    path: str
    body: Any = None
    port: int = _PORTS[0]
    asked: str = ""

    @property
    def name(self) -> str:
        """What its answer is kept under."""
        return f"{self.method} {self.path}"

    def render(self) -> str:
        """The command to type, and the answer, as Markdown."""
        is_said = self.method == ("GET" if self.body is None else "POST")  # by what else stands there
        method = "" if is_said else f"-X {self.method} "
        words = [f"curl {method}http://127.0.0.1:{self.port}{self.asked or self.path}"]
        if self.body is not None:
            body = json.dumps(self.body).replace("'", "'\\''")
            words += ['-H "Content-Type: application/json"', f"-d '{body}'"]
        command = " \\\n  ".join(words)
        answer = read_answers().get(self.name, "")
        kind = "json" if answer.startswith(("{", "[")) else "text"
        return f"```bash\n{command}\n```\n" + (f"\n```{kind}\n{answer}\n```\n" if answer else "")

    def ask(self, base_url: str) -> str:
        """What a server answers; raises OSError for any other answer than a success."""
        data = None if self.body is None else json.dumps(self.body).encode()
        headers = {"content-type": "application/json"}
        url = base_url.rstrip("/") + (self.asked or self.path)
        request = urllib.request.Request(url, data, headers, method=self.method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()


def shorten_answer(text: str) -> str:
    """JSON in a few lines, without what differs each time; other texts' first lines."""
    try:
        answer = _shorten(json.loads(text))
    except ValueError:
        return "\n".join([*text.splitlines()[:_MAX_LINES], "..."])
    return _format(answer, 0)


def _shorten(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _shorten(part, key) for key, part in value.items()}
    if isinstance(value, list):
        is_long = len(value) > 2 * _MAX_NUMBERS and all(isinstance(part, (int, float)) for part in value)
        kept = [_shorten(part) for part in value[: _MAX_NUMBERS if is_long else None]]
        return [*kept, "..."] if is_long else kept
    if isinstance(value, float):
        return 1790000000.0 if value > 1e9 else round(value, 4)
    if name in ("created", "created_at", "completed_at") and isinstance(value, int):
        return 1790000000
    if isinstance(value, str):
        value = re.sub(r"\b(\w+[-_])?[0-9a-f]{16,}\b", r"\g<1>1f", value)
        value = re.sub(r"^/.*/tools/pocket/", ".../tools/pocket/", value)
        return value if len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]}..."
    return value


def _format(value: Any, depth: int) -> str:
    """JSON with what fits on a line on one."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + 2 * depth <= 110 or not isinstance(value, (dict, list)):
        return line
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"{inner}{_format(part, depth + 1)}" for part in value) + f"\n{outer}]"
    rows = (f"{inner}{json.dumps(key)}: {_format(part, depth + 1)}" for key, part in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{outer}}}"


_REQUESTS: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
EXAMPLES = {example.name: example for example in (Example(**request) for request in _REQUESTS)}


def find_example(method: str, path: str) -> Example | None:
    """A route's; None where it has none yet, which a test refuses."""
    return EXAMPLES.get(f"{method.upper()} {path}")


def read_answers() -> dict[str, str]:
    """What was answered when somebody last asked, by Example.name."""
    answers: dict[str, str] = json.loads(_ANSWERS.read_text()) if _ANSWERS.is_file() else {}
    return answers


def record_answers(urls: list[str]) -> None:
    """Ask the servers at `urls`, one a port of the examples, and keep what they say."""
    answers: dict[str, str] = {}
    response_id = ""
    for name, example in EXAMPLES.items():
        if name in _UNASKED:
            continue
        asked = example._replace(asked=(example.asked or example.path).replace("resp-1f", response_id))
        answer = asked.ask(urls[_PORTS.index(example.port)])
        answers[name] = shorten_answer(answer)
        if name == "POST /v1/responses":
            response_id = json.loads(answer)["id"]
    _ANSWERS.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
