"""Public text that is on every machine: the docstrings of Python's standard library, in a fixed order. Sources are parsed, not run.

The text depends on the Python version alone, so the digest is printed with every figure made from it.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path

# Modules with long prose first; those that a Python does not have are passed over.
MODULES = (
    "argparse", "statistics", "threading", "subprocess", "pathlib", "difflib", "doctest", "random", "fractions", "decimal",
    "collections", "heapq", "bisect", "contextlib", "functools", "typing", "enum", "dataclasses", "inspect", "ast", "textwrap",
    "string", "re", "csv", "json", "json.decoder", "json.encoder", "configparser", "logging", "logging.handlers", "logging.config",
    "optparse", "getopt", "cmd", "pdb", "bdb", "trace", "timeit", "profile", "pstats", "tempfile", "shutil", "zipfile", "tarfile",
    "gzip", "bz2", "lzma", "os", "glob", "fnmatch", "socket", "socketserver", "selectors", "ssl", "ftplib", "smtplib", "imaplib",
    "poplib", "http.client", "http.server", "http.cookies", "http.cookiejar", "urllib.parse", "urllib.request", "email.message",
    "email.header", "email.utils", "email.policy", "email.generator", "mailbox", "mimetypes", "html.parser", "xml.dom.minidom",
    "xml.etree.ElementTree", "xml.sax.handler", "asyncio.events", "asyncio.tasks", "asyncio.streams", "asyncio.base_events",
    "concurrent.futures._base", "concurrent.futures.process", "multiprocessing.pool", "multiprocessing.managers", "queue", "sched",
    "calendar", "_strptime", "copy", "pickle", "pickletools", "shelve", "sqlite3.dump", "uuid", "ipaddress", "hashlib", "hmac",
    "secrets", "colorsys", "turtle", "unittest.case", "unittest.mock", "unittest.loader", "unittest.main", "tokenize", "traceback",
    "weakref", "types", "abc", "numbers", "codecs", "locale", "gettext", "platform", "webbrowser", "wsgiref.handlers", "xmlrpc.client",
)  # fmt: skip


def docstrings(characters: int) -> str:
    """The first `characters` of all docstrings of MODULES, two line ends between them. Shorter when they are fewer."""
    parts: list[str] = []
    count = 0
    for text in _all():
        parts.append(text)
        count += len(text) + 2
        if count >= characters:
            break
    return "\n\n".join(parts)[:characters]


def _all() -> Iterator[str]:
    for name in MODULES:
        source = _source(name)
        if source is None:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False)
                if text and text.strip():
                    yield inspect.cleandoc(text)


def _source(name: str) -> str | None:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return None
    return Path(found.origin).read_text(encoding="utf-8")
