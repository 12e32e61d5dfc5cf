"""The chat page's files, read once at start and served under a strict content policy. Knows files; refuses to know the rest.

No script, style or connection from anywhere but this server can run in the page.
"""

from __future__ import annotations

import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

WEB_FOLDER = Path(__file__).resolve().parent / "web"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".html": "text/html",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_TEXT = ("text/", "image/svg+xml", "application/json")
_PLACEHOLDER = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Forespeak</title>
<h1>Forespeak</h1><p>The server runs. The chat page is not part of this installation; use /v1/chat/completions or /v1/ws.</p></html>
"""


@dataclass(frozen=True, slots=True)
class Page:
    data: bytes
    media_type: str
    etag: str


def _page(data: bytes, name: str) -> Page:
    media = _TYPES.get(Path(name).suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    if media.startswith(_TEXT):
        media += "; charset=utf-8"
    return Page(data, media, f'"{hashlib.sha256(data).hexdigest()[:24]}"')


def load_pages(folder: Path = WEB_FOLDER) -> dict[str, Page]:
    """URL path -> page. index.html is `/`. A missing folder gives a placeholder."""
    pages = {"/": _page(_PLACEHOLDER, "index.html")}
    if folder.is_dir():
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not any(part.startswith((".", "__")) for part in path.relative_to(folder).parts):
                pages["/" if name == "index.html" else "/" + name] = _page(path.read_bytes(), name)
    return pages


def page_response(page: Page, request: Request) -> Response:
    headers = _HEADERS | {"etag": page.etag}
    if request.headers.get("if-none-match") == page.etag:
        return Response(status_code=304, headers=headers)
    return Response(page.data, 200, headers | {"content-type": page.media_type})
