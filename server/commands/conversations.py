"""`kvtier conversations`: lists conversations, and retains, demotes or deletes their blocks."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ...protos.durations import duration_of, seconds_of
from ...protos.endpoint import Endpoint
from ...protos.v1.conversation_pb2 import (
    ActOnConversationRequest,
    ActOnConversationResponse,
    ConversationStatus,
    ListConversationsRequest,
    ListConversationsResponse,
)
from ...protos.wire.packed_keys import pack_keys
from ..config.units import human_age, human_size, parse_duration
from .admin_client import ask, json_values, plain_console, show_answer
from .console import EXIT_USAGE, refuse
from .tables import ResponsiveTable

__all__ = ["LISTS", "run", "to_json"]

LISTS = ("list", "show")
"""Actions that change nothing."""


def run(options: argparse.Namespace) -> int:
    try:
        method, request = _request(options)
    except ValueError as error:
        return refuse([f"{error}"], EXIT_USAGE)
    return show_answer(
        options,
        lambda endpoint, timeout: ask(endpoint, method, request, timeout, "ConversationService"),
        to_json,
        _show if options.action in LISTS else _show_result,
    )


def _request(options: argparse.Namespace) -> tuple[str, Any]:
    """Returns the method and the request for these options. Raises `ValueError`."""
    if options.action == "list":
        if options.conversation is not None:
            raise ValueError("list takes no conversation; use show")
        return "ListConversations", ListConversationsRequest(
            tenant=options.tenant, max_conversations=options.most, page=options.page
        )
    named = [name for name in ("conversation", "prompt", "block") if getattr(options, name)]
    if len(named) != 1 or (options.action == "show" and named != ["conversation"]):
        raise ValueError(
            f"{options.action} needs a conversation" + ("" if options.action == "show" else ", --prompt or --block")
        )
    if options.action == "show":
        return "ListConversations", ListConversationsRequest(
            tenant=options.tenant, conversation_id=options.conversation, page=options.page
        )
    request = ActOnConversationRequest(
        tenant=options.tenant,
        action=f"CONVERSATION_ACTION_{options.action.upper()}",
        conversation_id=options.conversation,
        last_key=_bytes("--prompt", options.prompt or ""),
        namespace_id=_bytes("--namespace", options.namespace or ""),
        keys=pack_keys([_bytes("--block", block) for block in options.block]),
    )
    if options.duration is not None:
        try:
            request.retain_for.CopyFrom(duration_of(parse_duration(options.duration)))
        except ValueError as error:
            raise ValueError(f"--for {options.duration}: {error}") from None
    elif options.action == "retain":
        raise ValueError("retain needs --for")
    return "ActOnConversation", request


def _bytes(flag: str, text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ValueError(f"{flag} {text}: must be hexadecimal digits") from None


def to_json(answer: ListConversationsResponse | ActOnConversationResponse) -> str:
    """Returns an answer as JSON, with the fields of `kvtier/v1/conversation.proto`."""
    if isinstance(answer, ActOnConversationResponse):
        return json.dumps(json_values(answer), indent=2)
    page = [_values(status) for status in answer.conversations]
    return json.dumps({"total": answer.total, "next_page": answer.next_page, "conversations": page}, indent=2)


def _values(status: ConversationStatus) -> dict[str, Any]:
    return {
        "conversation_id": status.conversation_id,
        "tenant": status.tenant,
        "namespace_id": status.namespace_id.hex(),
        "requests": status.requests,
        "blocks": status.blocks,
        "tiers": [json_values(tier) for tier in status.tiers],
        "age_seconds": seconds_of(status.age),
        "idle_seconds": seconds_of(status.idle),
        "retained_for_seconds": seconds_of(status.retained_for) if status.HasField("retained_for") else None,
        "pinned": status.pinned,
    }


def _show(answer: ListConversationsResponse, _: Endpoint) -> None:
    console = plain_console()
    if not answer.conversations:
        console.print("no conversations")
        return
    numbers = ("requests", "blocks", "age", "idle", "retained for")
    table = ResponsiveTable("conversation", "tenant", "namespace", "in tiers", numbers=numbers)
    for status in answer.conversations:
        retained = human_age(seconds_of(status.retained_for)) if status.HasField("retained_for") else "-"
        table.add_row(
            status.conversation_id,
            status.tenant or "-",
            status.namespace_id.hex(),
            ", ".join(f"{tier.tier}: {tier.blocks:,} ({human_size(tier.bytes)})" for tier in status.tiers),
            f"{status.requests:,}",
            f"{status.blocks:,}",
            human_age(seconds_of(status.age)),
            human_age(seconds_of(status.idle)),
            "pinned" if status.pinned else retained,
        )
    console.print(table)
    if answer.next_page:
        console.print(f"{len(answer.conversations):,} of {answer.total:,}; more with --page {answer.next_page}")


def _show_result(answer: ActOnConversationResponse, _: Endpoint) -> None:
    plain_console().print(
        f"{answer.changed_blocks:,} blocks changed, {answer.shared_blocks:,} of other conversations left alone, "
        f"{answer.kept_blocks:,} kept, {answer.missing_blocks:,} in no tier"
    )
