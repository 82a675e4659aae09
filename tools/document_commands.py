"""Generates docs/commands.md from the parser of `kvtier` and from the JSON of its commands.

python tools/document_commands.py          # write
python tools/document_commands.py --check  # compare; exit with 1 if the page differs
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtier.protos.v1 import admin_pb2, cache_pb2, common_pb2, conversation_pb2
from kvtier.server.commands import conversations, drain, evict, explain, fleet_view, handoffs, leases, size
from kvtier.server.commands.console import EXIT_CODES
from kvtier.server.commands.doctor import CHECKS
from kvtier.server.commands.parser import new_parser
from kvtier.server.commands.rates import rates
from kvtier.server.telemetry import status
from kvtier.server.tier_host import offline_fsck

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"

_HEAD = """\
# Commands

Reference of the commands of `kvtier`, generated from the code by `make generate`. [Running a server](running.md) and
the pages that it lists explain when to use each command.

- *Server:* commands that call a running server use the address of `--endpoint`. Without this flag they use
  `KVTIER_ENDPOINT`. If neither is set, they use this user's default socket.
- *Credentials:* if the server requires credentials, these commands need a token with the role `admin`
  ([Security](security.md)).
- *Output:* by default, tables for people; their format may change. With `--json`, one JSON document (`top`: one per
  line and interval). The field names in the JSON are stable; releases may add fields.
- *Errors:* one line each, on standard error. On a terminal, progress bars also appear on standard error.
"""

_COMPLETION = """\
## Completion

```console
$ mkdir -p ~/.local/share/bash-completion/completions ~/.config/fish/completions
$ kvtier completion bash > ~/.local/share/bash-completion/completions/kvtier
$ kvtier completion zsh > "${fpath[1]}/_kvtier"
$ kvtier completion fish > ~/.config/fish/completions/kvtier.fish
```
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() != page():
        print(f"{PAGE.name} differs from the code: make generate")
        return 1
    return 0


def page() -> str:
    pieces = [_HEAD, "## Exit codes\n", _table(("code", "command", "meaning"), _exit_codes())]
    fields = json_fields()
    for name, help_, command in _commands():
        pieces += [f"## kvtier {name}\n", f"{_sentence(command.description or help_)}\n"]
        pieces.append(_table(("argument", "meaning"), _arguments(command)))
        if name in fields:
            pieces.append("With `--json`: " + ", ".join(f"`{field}`" for field in fields[name]) + ".\n")
        if name == "doctor":
            pieces.append("Checks: " + ", ".join(f"`{check}`" for check in CHECKS) + ".\n")
    return "\n".join([*pieces, _COMPLETION])


def json_fields() -> dict[str, list[str]]:
    """Returns the paths of the JSON fields of each command, from examples of its output."""
    answer = admin_pb2.GetStatusResponse(
        tiers=[admin_pb2.TierStatus(shared=True, shares=[admin_pb2.ShareStatus()])],
        sessions=[admin_pb2.SessionStatus(groups=[common_pb2.Group()])],
        handoffs=[admin_pb2.HandoffTotals()],
        misses=[admin_pb2.MissCount()],
    )
    values = status.values(answer)
    listed = admin_pb2.ListHandoffsResponse(handoffs=[admin_pb2.HandoffStatus()], totals=[admin_pb2.HandoffTotals()])
    known = conversation_pb2.ListConversationsResponse(
        conversations=[conversation_pb2.ConversationStatus(tiers=[conversation_pb2.ConversationTier()])]
    )
    explained = admin_pb2.ExplainRequestResponse(
        votes=[cache_pb2.TierVote()],
        holds=[admin_pb2.HoldExplained()],
        lookups=[
            admin_pb2.LookupExplained(
                claim_outcome=1, spans=[admin_pb2.KeySpan(miss_reason=1), admin_pb2.KeySpan(hit_tier="cpu")]
            )
        ],
    )
    row = fleet_view.server_row("", values, None, live=False, problem={"state": "", "reason": ""})
    fleet = fleet_view.fleet_values([row], live=False)
    report = offline_fsck.TierReport("lmdb", "lmdb", findings=[offline_fsck.Finding(b"", 0, "", repaired=False)])
    return {
        name: sorted(_paths(document))
        for name, document in {
            "status": values,
            "tiers": {key: values[key] for key in ("tiers", "region", "quarantined_bytes")},
            "sessions": {"sessions": values["sessions"]},
            "top": rates(values, values, 1.0),
            "leases": json.loads(leases.to_json(admin_pb2.ListLeasesResponse(leases=[admin_pb2.LeaseStatus()]))),
            "handoffs": json.loads(handoffs.to_json(listed)),
            "conversations": json.loads(conversations.to_json(known)),
            "explain": json.loads(explain.to_json(explained, "")),
            "fsck": json.loads(offline_fsck.to_json([report])),
            "evict": {"dry_run": 0, "done": 0, "tiers": [dict.fromkeys(evict.FIGURES)]},
            "drain": dict.fromkeys(("mode", *drain.FIGURES, "ended")),
            "fleet status": fleet,
            "fleet top": fleet,
            "fleet drain": {
                "mode": 0,
                "servers": [dict.fromkeys(("server", "state", "reason", *drain.FIGURES, "ended"))],
                "complete": 0,
            },
            "config": {"config": 0, "origins": 0},
            "size": size.figures(size.KvShape(1, 0, 0, False, 1, 1, "fp8", 1), 1, 1, {"cpu": 0, "disk": 0}),
            "doctor": {"ok": 0, "findings": [dict.fromkeys(("check", "verdict", "seen", "why", "do"))]},
        }.items()
    }


def _paths(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict) and value:
        return {each for key, item in value.items() for each in _paths(item, f"{path}.{key}" if path else key)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {each for item in value for each in _paths(item, f"{path}[]")}
    return {path}


def _exit_codes() -> Iterator[tuple[str, ...]]:
    return ((f"{code}", commands, meaning) for code, commands, meaning in EXIT_CODES)


def _commands() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    [group] = [each for each in new_parser()._actions if isinstance(each, argparse._SubParsersAction)]  # noqa: SLF001
    helps = {each.dest: each.help or "" for each in group._choices_actions}  # noqa: SLF001
    for name, command in group.choices.items():
        actions = [each for each in command._actions if isinstance(each, argparse._SubParsersAction)]  # noqa: SLF001
        if not actions:
            yield name, helps[name], command
        for below in actions:
            said = {each.dest: each.help or "" for each in below._choices_actions}  # noqa: SLF001
            yield from ((f"{name} {word}", said[word], action) for word, action in below.choices.items())


def _arguments(command: argparse.ArgumentParser) -> Iterator[tuple[str, ...]]:
    for action in command._actions:  # noqa: SLF001
        if isinstance(action, argparse._HelpAction):  # noqa: SLF001
            continue
        metavar = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else "")
        value = f" {metavar}" if action.nargs != 0 and metavar else ""
        name = f"{', '.join(action.option_strings)}{value}" if action.option_strings else f"{metavar or action.dest}"
        yield f"`{name}`", (action.help or "").replace("|", "\\|")


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


if __name__ == "__main__":
    sys.exit(main())
