"""docs/commands.md says what the commands are."""

import importlib.util
import re
from pathlib import Path

from kvtier.server import cli
from kvtier.server.commands.console import EXIT_CODES
from kvtier.server.commands.parser import new_parser

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "commands.md"


def test_the_page_is_what_the_tool_writes() -> None:
    """Flags, exit codes and fields come from the code: run tools/document_commands.py."""
    spec = importlib.util.spec_from_file_location("document_commands", ROOT / "tools" / "document_commands.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert PAGE.read_text() == tool.page()


def test_every_command_has_a_module_and_every_module_of_a_command_a_parser() -> None:
    """`kvtier X` is run by `commands/X.py`, or by the module that `cli` names."""
    commands = set(re.findall(r"^## kvtier (\w+)", PAGE.read_text(), re.MULTILINE))
    runs = {path.stem for path in (ROOT / "server" / "commands").glob("*.py") if "\ndef run(" in path.read_text()}
    assert {cli._MODULES.get(command, command) for command in commands} == runs


def test_every_exit_code_is_in_the_help() -> None:
    """There is one table, and `kvtier --help` shows it."""
    help_ = new_parser().format_help()
    for code, _, meaning in EXIT_CODES:
        assert f"  {code:<3} " in help_
        assert meaning in help_
