"""The OpenAPI document at /openapi.json, made from the same structs that decode the requests."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.httpio import json_response
from server.openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.responses_types import ResponsesRequest

_BODIES: dict[str, tuple[Any, str]] = {
    "/v1/chat/completions": (ChatRequest, "A chat answer, whole or as server-sent events."),
    "/v1/completions": (CompletionRequest, "Text that continues a prompt."),
    "/v1/responses": (ResponsesRequest, "A response of the Responses API."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or of messages."),
    "/detokenize": (DetokenizeRequest, "The text of token ids."),
}
_GETS = {
    "/v1/models": "The model served here.",
    "/tokenizer_info": "The vocabulary's size and the chat template.",
    "/health": "The process lives.",
    "/ready": "The engine makes progress and takes work.",
    "/openapi.json": "This document.",
}
_STREAMS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "403": "Host or Origin is not allowed.",
    "404": "No such model.",
    "413": "The body is too large.",
    "429": "Too many requests of this key; see Retry-After.",
    "500": "The engine failed on this request.",
    "503": "No work is taken now; see Retry-After.",
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


@cache
def document() -> dict[str, Any]:
    """The whole document as plain JSON values."""
    kinds = [kind for kind, _ in _BODIES.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    errors = {
        code: {"description": text, "content": _json({"$ref": "#/components/schemas/Error"})} for code, text in _ERRORS.items()
    }
    paths: dict[str, Any] = {}
    for (path, (_, summary)), schema in zip(_BODIES.items(), schemas, strict=True):
        content = _json({"type": "object"}) | (
            {"text/event-stream": {"schema": {"type": "string"}}} if path in _STREAMS else {}
        )
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": _json(schema)},
                "responses": {"200": {"description": "The answer.", "content": content}, **errors},
            }
        }
    for path, summary in _GETS.items():
        ok = {"200": {"description": summary, "content": _json({"type": "object"})}}
        responses = ok | (
            {"503": {"description": "Not ready.", "content": _json({"type": "object"})}} if path == "/ready" else {}
        )
        paths[path] = {"get": {"summary": summary, "responses": responses | {code: errors[code] for code in ("401", "403")}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forespeak", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


async def openapi(request: Request) -> Response:
    return json_response(document())
