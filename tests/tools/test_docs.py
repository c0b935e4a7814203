"""The generated parts of docs/ are what the sources say, and links between documents lead somewhere."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from quire.frontend.cli.commands import daemon
from quire.frontend.cli.entry import COMMANDS
from quire.frontend.cli.parser import Parser, UsageError, describe
from quire.frontend.http.dialects.table import ROUTES
from quire.tools.docs.__main__ import PAGES, update_page
from quire.tools.docs.examples import EXAMPLES, shorten_answer
from quire.tools.docs.http_api import FIELD_TEXTS, make_document
from quire.tools.markdown import format_table, replace_parts

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_says_what_the_sources_say(path: Path) -> None:
    stale = path.read_text(encoding="utf-8") != update_page(path)
    assert not stale, "run `python -m quire.tools.docs`"


def list_operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, operations in make_document()["paths"].items():
        yield from ((f"{method.upper()} {path}", operation) for method, operation in operations.items())


def test_each_route_has_an_example_and_each_example_a_route() -> None:
    without = {name for name, _ in list_operations()} ^ set(EXAMPLES)
    assert not without, "a route has one Example in tools/docs/examples.py"


def test_examples_say_what_their_routes_need_and_nothing_that_they_do_not_know() -> None:
    schemas = make_document()["components"]["schemas"]
    for name, operation in list_operations():
        body = EXAMPLES[name].body
        assert (body is not None) == ("requestBody" in operation), name
        content = operation.get("requestBody", {}).get("content", {})
        reference = content.get("application/json", {}).get("schema", {}).get("$ref")
        if reference is not None:
            schema = schemas[reference.rpartition("/")[2]]
            assert set(schema.get("required", ())) <= set(body) <= set(schema["properties"]), name


def test_each_field_of_a_request_for_vectors_has_a_meaning() -> None:
    sections = (ROOT / "docs" / "http.md").read_text(encoding="utf-8").split("\n## POST ")
    paths = {path for path, route in ROUTES.items() if route.task not in (None, "generate")}
    texts = [one for one in sections if one.split()[0] in paths]
    assert len(texts) == 13
    for text in texts:
        assert "|  |\n" not in text, text
        assert "to generate" not in text, text


def test_no_field_is_told_of_that_there_is_not() -> None:
    schemas = make_document()["components"]["schemas"].values()
    assert set(FIELD_TEXTS) <= {name for schema in schemas for name in schema.get("properties", ())}


def find_anchors(page: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for name, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        target = (document.parent / name) if name else document
        assert target.exists(), name
        if anchor:
            assert anchor in find_anchors(target.read_text(encoding="utf-8")), f"{name}#{anchor}"


def test_only_the_generated_parts_of_a_page_are_replaced() -> None:
    page = "# Title\n<!-- begin one: so -->\nold\n<!-- end one -->\nprose\n"
    expected = "# Title\n<!-- begin one: so -->\n\nnew\n<!-- end one -->\nprose\n"
    assert replace_parts(page, {"one": "new"}) == expected
    with pytest.raises(ValueError):
        replace_parts(page, {"two": "new"})
    with pytest.raises(ValueError):
        replace_parts(page.replace("end", "and"), {"one": "new"})


def test_a_cell_of_a_table_may_hold_bars_and_lines() -> None:
    assert format_table(["a"], [["x|y\nz"]]) == "| a |\n| --- |\n| x\\|y z |\n"


def test_an_answer_is_shortened_to_what_does_not_differ() -> None:
    answer = (
        '{"id": "cmpl-0123456789abcdef01", "created": 1700000001, "embedding": [1.23456, 2, 3, 4, 5, 6, 7]}'
    )
    assert shorten_answer(answer) == (
        '{"id": "cmpl-1f", "created": 1790000000, "embedding": [1.2346, 2, 3, "..."]}'
    )


def test_a_command_tells_its_options_or_its_subcommands_and_does_nothing() -> None:
    names = describe(daemon.run)
    assert isinstance(names, tuple)
    assert "stop" in names
    parser = describe(daemon.run, ["stop"])
    assert isinstance(parser, Parser)
    assert parser.prog == "quire daemon stop"


DEPLOYMENTS = ROOT / "docs" / "deploy"
# What a shell block may hold beside commands of ours, which are looked at.
OURS = re.compile(r"(?:^|[|&]\s*)(?:\.venv/bin/|/opt/quire/bin/)?quire ([^|&#\n]+)", re.M)


def list_commands(document: Path) -> list[str]:
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    return [words.strip() for block in blocks for words in OURS.findall(block.replace("\\\n", " "))]


def parse_command(words: list[str]) -> None:
    """Raises UsageError for what its command would not take."""
    command = COMMANDS[words[0]]
    run = importlib.import_module(command.module, "quire.frontend.cli.commands").run
    found, rest = describe(run), words[1:]
    if isinstance(found, tuple):
        found, rest = describe(run, rest[:1]), rest[1:]
    assert isinstance(found, Parser)
    found.parse(rest)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_documents_show_have_these_options(document: Path) -> None:
    for command in list_commands(document):
        words = shlex.split(command)
        if words[0] not in ("bench", "--help"):
            parse_command(words)


def test_a_command_with_an_option_that_there_is_not_is_found() -> None:
    with pytest.raises(UsageError):
        parse_command(["daemon", "stop", "--engines", "2"])


def test_files_of_deployments_can_be_read_and_name_options_that_there_are() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in DEPLOYMENTS.iterdir()}
    kinds = {name: list(yaml.safe_load_all(text)) for name, text in files.items() if name.endswith(".yaml")}
    [deployment] = [one for one in kinds["kubernetes.yaml"] if one["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    image = json.loads(re.findall(r"^CMD (\[.*\])$", files["Dockerfile"], re.M)[-1])
    for words in (container["args"], kinds["compose.yaml"][0]["services"]["quire"]["command"], image):
        parse_command(words)
    parse_command(["serve", "--config", str(DEPLOYMENTS / "serve.yaml")])
    [unit] = re.findall(r"^ExecStart=/opt/quire/bin/quire (.*)$", files["quire.service"], re.M)
    parse_command(["serve", "--config", str(DEPLOYMENTS / "serve.yaml"), *shlex.split(unit)[3:]])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in make_document()["paths"]
