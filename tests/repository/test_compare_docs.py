"""docs/compare.md, docs/faq.md and the issue forms name only pages, settings, nodes and commands that exist."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
from pathlib import Path

import carom
import pytest
import yaml
from carom.cli.main import COMMANDS, build_parser
from carom.toolkit_ext.options import OPTIONS

PAGES = ("docs/compare.md", "docs/faq.md")
FORMS = ("bug.yml", "performance.yml")
FORM_FOLDER = Path(".github") / "ISSUE_TEMPLATE"


def text_of(root: Path, page: str) -> str:
    return (root / page).read_text("utf-8")


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def parser_of(command: str) -> argparse.ArgumentParser:
    (commands,) = (
        action for action in build_parser(command)._actions if isinstance(action, argparse._SubParsersAction)
    )
    return commands.choices[command]


def carom_calls(text: str) -> list[ast.Call]:
    """The calls of `carom.stream` in code spans, and the calls that they contain."""
    calls = []
    for span in code_spans(text):
        for source in re.findall(r"carom\.stream\([^`]*\)", span):
            expression = ast.parse(source.replace("...", "None"), mode="eval").body
            assert isinstance(expression, ast.Call)
            calls.append(expression)
    return calls


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_page_and_to_a_heading_of_it(root: Path, page: str):
    here = root / page
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text_of(root, page)) if "://" not in link]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = here.parent / path if path else here
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES)
def test_calls_of_stream_use_arguments_that_it_has(root: Path, page: str):
    parameters = inspect.signature(carom.stream).parameters
    calls = carom_calls(text_of(root, page))
    assert calls
    for call in calls:
        assert {keyword.arg for keyword in call.keywords} <= parameters.keys(), ast.unparse(call)


@pytest.mark.parametrize("page", PAGES)
def test_settings_written_alone_are_arguments_of_stream(root: Path, page: str):
    others = {"nvme", "nvme_path", "device_map", "memory"}  # RamTorch, accelerate, WSL
    alone = set(re.findall(r"`(\w+)=`", text_of(root, page))) - others
    assert alone and alone <= inspect.signature(carom.stream).parameters.keys()


@pytest.mark.parametrize("page", PAGES)
def test_public_names_exist(root: Path, page: str):
    for name in re.findall(r"`(?:with )?carom\.(\w+)", text_of(root, page)):
        assert name in carom.__all__, name
    for name in re.findall(r"`Session\.(\w+)\(", text_of(root, page)):
        assert callable(getattr(carom.Session, name)), name
    for name in re.findall(r"session\.(\w+)\(", text_of(root, page)):
        assert callable(getattr(carom.Session, name)), name


@pytest.mark.parametrize("page", PAGES)
def test_nodes_have_the_names_that_comfyui_shows(root: Path, page: str):
    shown = {node["display_name"] for node in json.loads(text_of(root, "locales/en/nodeDefs.json")).values()}
    named = re.findall(r"\*\*([^*]+ \(Carom\))\*\*", text_of(root, page))
    assert named
    assert set(named) <= shown


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(root: Path, page: str):
    spans = [re.sub(r"\s+", " ", span) for span in code_spans(text_of(root, page))]
    commands = [span.split() for span in spans if re.match(r"carom [a-z]", span)]
    assert commands
    for _, command, *rest in commands:
        assert command in COMMANDS, command
        options = {option for action in parser_of(command)._actions for option in action.option_strings}
        assert {word for word in rest if word.startswith("--")} <= options, (command, rest)


def test_the_yaml_for_ai_toolkit_has_options_that_the_extension_reads(root: Path):
    for written in re.findall(r"`offload_kwargs: (\{[^}]*\})`", text_of(root, "docs/compare.md")):
        assert set(yaml.safe_load(written)) <= set(OPTIONS)


def test_every_peer_with_an_option_in_the_table_has_a_version(root: Path):
    text = text_of(root, "docs/compare.md")
    read, _, rest = text.partition("## Features")
    rows = rest.partition("## Coming from another tool")[2]
    peers = {row.strip() for row in re.findall(r"^\| ([^|]+?) \| `", rows, re.M)}
    assert len(peers) > 10
    for peer in peers:
        assert re.search(re.escape(peer), read, re.I), peer


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_prose_are_at_most_110_characters(root: Path, page: str):
    for line in text_of(root, page).splitlines():
        assert line.startswith("|") or len(line) <= 110, line


@pytest.mark.parametrize("name", FORMS)
def test_issue_forms_ask_for_doctor_and_report(root: Path, name: str):
    form = yaml.safe_load((root / FORM_FOLDER / name).read_text("utf-8"))
    assert form["name"] and form["description"]
    fields = {part["id"]: part for part in form["body"] if part["type"] != "markdown"}
    assert len(fields) == sum(part["type"] != "markdown" for part in form["body"])
    assert "carom doctor --json" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"]["required"]
    assert "user name" in fields["doctor"]["attributes"]["description"]
    assert "Report (Carom)" in fields["report"]["attributes"]["description"]
    for part in form["body"]:
        assert part["type"] in {"markdown", "textarea", "input", "dropdown"}
        assert part["attributes"].get("label") or part["type"] == "markdown"
        assert part["attributes"].get("options") or part["type"] != "dropdown"


@pytest.mark.parametrize("name", FORMS)
def test_links_of_issue_forms_lead_to_the_repository(root: Path, name: str):
    links = re.findall(
        r"\]\(\.\./blob/main/([^)#]+)#?([^)]*)\)", (root / FORM_FOLDER / name).read_text("utf-8")
    )
    assert links
    for path, anchor in links:
        assert (root / path).exists(), path
        assert not anchor or anchor in anchors(root / path), anchor
