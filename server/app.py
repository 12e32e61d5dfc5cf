"""The web application: routes, one guard in front of them, errors in one shape. Knows what exists; refuses to know how it works."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from server import openai, responses
from server.api_error import ApiError
from server.auth import Gate
from server.connection import Sockets, native_socket
from server.engine_watch import EngineState
from server.guard import Guard
from server.histories import Histories
from server.httpio import Handler, error_response, guarded, json_response
from server.metrics import CONTENT_TYPE
from server.openapi import openapi as openapi_document
from server.pages import Page, load_pages, page_response
from server.responses_socket import responses_socket
from server.service import Service

HTTP_HISTORIES = 512  # answers kept for previous_response_id over HTTP, of all keys
HTTP_HISTORY_BYTES = 16 * 2**20


async def health(request: Request) -> Response:
    """The process lives and its event loop turns."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """Whether new work would be done now. 503 while loading, restarting, draining, or after giving up."""
    service: Service = request.app.state.service
    state = service.engine.state
    word = "draining" if service.draining else state.value
    if state is EngineState.READY and not service.engine.responsive:
        word = "unresponsive"
    good = word == EngineState.READY.value
    return json_response({"status": word, "model": service.model, "restarts": service.engine.restarts}, 200 if good else 503)


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.render(), 200, {"content-type": CONTENT_TYPE})


def _page_handler(page: Page) -> Handler:
    async def handler(request: Request) -> Response:
        return page_response(page, request)

    return handler


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    messages = {404: f"there is nothing at {path}", 405: f"{request.method} is not allowed at {path}"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    api_error = ApiError(
        error.status_code,
        messages.get(error.status_code, str(error.detail)),
        code=codes.get(error.status_code, "http_error"),
        headers=tuple((error.headers or {}).items()),
    )
    return error_response(api_error)


def _routes(pages: dict[str, Page]) -> list[BaseRoute]:
    http: Iterable[tuple[str, str, Callable[[Request], Awaitable[Any]]]] = (
        ("GET", "/health", health),
        ("GET", "/ready", ready),
        ("GET", "/metrics", metrics),
        ("GET", "/openapi.json", openapi_document),
        *openai.ROUTES,
        *responses.ROUTES,
        *(("GET", path, _page_handler(page)) for path, page in pages.items()),
    )
    routes: list[BaseRoute] = [Route(path, guarded(handler), methods=[method]) for method, path, handler in http]
    return [*routes, WebSocketRoute("/v1/ws", native_socket), WebSocketRoute("/v1/responses", responses_socket)]


def make_app(service: Service, gate: Gate, sockets: Sockets, pages: dict[str, Page] | None = None) -> Starlette:
    """The ASGI application. Starting and stopping engine and server is the caller's."""
    pages = load_pages() if pages is None else pages
    app = Starlette(
        routes=_routes(pages),
        middleware=[Middleware(Guard, gate=gate, pages=pages.keys())],
        exception_handlers={HTTPException: _http_error},
    )
    app.state.service = service
    app.state.sockets = sockets
    app.state.histories = Histories(HTTP_HISTORIES, HTTP_HISTORY_BYTES)
    return app
