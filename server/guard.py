"""The check in front of every route and both sockets, as one plain ASGI layer: Host, Origin, key, cross-origin headers.

Knows headers and paths; refuses to know what a route does. It never wraps `receive`, so disconnects stay visible.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api_error import ApiError
from server.auth import Gate, basic_password, bearer
from server.httpio import error_response

OPEN_PATHS = frozenset({"/health", "/ready"})
KEYLESS_SOCKETS = frozenset({"/v1/ws"})  # may say the key in their first message, for browsers
CLOSE_ORIGIN = 1008


class Guard:
    """`pages` are the paths a browser loads itself; for those the key may come as the password of Authorization: Basic."""

    def __init__(self, app: ASGIApp, gate: Gate, pages: Iterable[str] = ()) -> None:
        self._app = app
        self._gate = gate
        self._pages = frozenset(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        listed = self._gate.is_listed(headers.get("origin"))
        try:
            self._gate.check_host(headers)
            if scope["path"] not in OPEN_PATHS:
                if not self._gate.origin_allowed(headers):
                    raise ApiError(403, "this Origin may not use this server", code="origin_not_allowed")
                if scope["method"] == "OPTIONS" and listed:
                    await _preflight(headers)(scope, receive, send)
                    return
                scope.setdefault("state", {})["tenant"] = self._tenant(scope, headers)
        except ApiError as error:
            await error_response(error)(scope, receive, _with_cors(send, headers) if listed else send)
            return
        await self._app(scope, receive, _with_cors(send, headers) if listed else send)

    def _tenant(self, scope: Scope, headers: Headers) -> str:
        is_page = scope["path"] in self._pages and scope["method"] in ("GET", "HEAD")
        if is_page and self._gate.keys.required:
            password = basic_password(headers)
            tenant = self._gate.keys.tenant_of(password) if password is not None else None
            if tenant is not None:
                return tenant
            if bearer(headers) is None and "text/html" in headers.get("accept", ""):
                ask = (("www-authenticate", 'Basic realm="forespeak: any name, the API key as password", charset="UTF-8"'),)
                raise ApiError(401, "this page needs an API key", code="invalid_api_key", headers=ask)
        return self._gate.tenant(headers)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._gate.check_host(headers)
            if not self._gate.origin_allowed(headers):
                await send({"type": "websocket.accept"})
                await send({"type": "websocket.close", "code": CLOSE_ORIGIN, "reason": "this Origin may not use this server"})
                return
            state = scope.setdefault("state", {})
            if self._gate.keys.required and bearer(headers) is None and scope["path"] in KEYLESS_SOCKETS:
                state["tenant"] = None
            else:
                state["tenant"] = self._gate.tenant(headers)
        except ApiError as error:
            await refuse_socket(scope, send, error)
            return
        await self._app(scope, receive, send)


async def refuse_socket(scope: Scope, send: Send, error: ApiError) -> None:
    """Answer a handshake with an HTTP error instead of accepting it."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": CLOSE_ORIGIN})
        return
    response = error_response(error)
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": response.raw_headers})
    await send({"type": "websocket.http.response.body", "body": response.body})


def _preflight(headers: Headers) -> Response:
    allow = {
        "access-control-allow-methods": "GET, POST, OPTIONS",
        "access-control-allow-headers": "authorization, content-type",
        "access-control-max-age": "600",
        "access-control-allow-origin": headers["origin"],
        "vary": "Origin",
    }
    return Response(status_code=204, headers=allow)


def _with_cors(send: Send, headers: Headers) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            out = MutableHeaders(raw=list(message.get("headers", [])))
            out["access-control-allow-origin"] = headers["origin"]
            out.add_vary_header("Origin")
            message = {**message, "headers": out.raw}
        await send(message)

    return wrapped
