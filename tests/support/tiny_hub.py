"""A Hugging Face hub of one repository on a loopback port, as far as its client looks: model info, file tree, file contents."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def tiny_hub(repository: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """(address, names of the files whose contents were asked for)"""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            api, resolve = f"/api/models/{repository}", f"/{repository}/resolve/"
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            if path in (api, f"{api}/revision/{COMMIT}", f"{api}/revision/main"):
                siblings = [{"rfilename": item["path"], "size": item["size"], "blobId": item["oid"]} for item in entries]
                self._answer(200, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())
            elif path.startswith(f"{api}/tree/"):
                self._answer(200, json.dumps(entries).encode())
            elif path.startswith(resolve) and (name := path.removeprefix(resolve).partition("/")[2]) in files:
                if self.command == "GET":
                    asked.append(name)
                etag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
                self._answer(200, files[name], {"ETag": etag, "X-Repo-Commit": COMMIT})
            else:
                self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
