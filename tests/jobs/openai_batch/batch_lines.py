"""Requests of batch files, to be changed by tests."""

from __future__ import annotations

from typing import Any

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**body: Any) -> dict[str, Any]:
    return {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "tenant", "messages": MESSAGES, **body},
    }


def completion(**body: Any) -> dict[str, Any]:
    return chat() | {"url": "/v1/completions", "body": {"model": "tenant", "prompt": "hello", **body}}
