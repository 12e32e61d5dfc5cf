"""Who may talk to the server: API keys, Host and Origin. Knows headers; refuses to know routes' meaning.

A key's tenant name is a digest, so that neither logs nor the prefix cache's salt carry the key itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from server.api_error import ApiError
from spec.errors import ConfigError

PUBLIC_TENANT = ""
MIN_KEY_CHARS = 8
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class Keys:
    """The accepted keys as digests, each with its tenant. Empty means that no key is asked for."""

    tenants: tuple[tuple[bytes, str], ...] = ()

    @staticmethod
    def of(keys: Iterable[str]) -> Keys:
        return Keys(tuple((_digest(key), hashlib.sha256(b"tenant:" + _digest(key)).hexdigest()[:16]) for key in keys))

    @staticmethod
    def read(path: Path) -> Keys:
        """One key a line, `NAME:KEY` or `KEY`; empty lines and # comments are skipped. Raises ConfigError."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API key file {path}: {error}") from error
        keys = []
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            key = text.rpartition(":")[2].strip()
            if len(key) < MIN_KEY_CHARS:
                raise ConfigError(f"{path}, line {number}: a key needs at least {MIN_KEY_CHARS} characters")
            keys.append(key)
        if not keys:
            raise ConfigError(f"the API key file {path} holds no key")
        return Keys.of(keys)

    @property
    def required(self) -> bool:
        return bool(self.tenants)

    def tenant_of(self, key: str) -> str | None:
        """The key's tenant, None for a wrong key. Looks at every key, so that time tells nothing."""
        if not self.tenants:
            return PUBLIC_TENANT
        digest, found = _digest(key), None
        for known, tenant in self.tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def bearer(headers: Mapping[str, str]) -> str | None:
    """The key of an Authorization: Bearer header, None when there is none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" and value.strip() else None


def basic_password(headers: Mapping[str, str]) -> str | None:
    """The password of an Authorization: Basic header: how a browser can load the page itself."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(value.strip(), validate=True).decode("utf-8").partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return None


def is_loopback(host: str) -> bool:
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Gate:
    """The check in front of every route and socket."""

    keys: Keys
    bind_host: str
    allowed_origins: frozenset[str] = frozenset()

    def check_host(self, headers: Mapping[str, str]) -> None:
        """On a loopback bind only loopback names may be asked for: a foreign name means that a web page's DNS points here."""
        if not is_loopback(self.bind_host):
            return
        name = _host_name(headers.get("host", ""))
        allowed = {urlsplit(origin).hostname for origin in self.allowed_origins}
        if name is None or not (is_loopback(name) or name in allowed):
            raise ApiError(403, "this Host is not served here; use localhost or add an allowed origin", code="host_not_allowed")

    def origin_allowed(self, headers: Mapping[str, str]) -> bool:
        """True without an Origin (not a browser's page), for the page's own origin, and for listed ones.

        Browsers leave default ports out of both headers, so host and port compare as written, whatever a proxy did to TLS.
        """
        origin = headers.get("origin")
        if origin is None or origin in self.allowed_origins:
            return True
        scheme, _, place = origin.partition("://")
        return scheme in ("http", "https") and bool(place) and place.lower() == headers.get("host", "").lower()

    def is_listed(self, origin: str | None) -> bool:
        return origin is not None and origin in self.allowed_origins

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request. Raises ApiError 401 for a missing or wrong key."""
        if not self.keys.required:
            return PUBLIC_TENANT
        key = bearer(headers)
        if key is None:
            raise unauthorized("no API key was given; send it as Authorization: Bearer KEY")
        tenant = self.keys.tenant_of(key)
        if tenant is None:
            raise unauthorized("this API key is not known")
        return tenant


def unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers=(("www-authenticate", 'Bearer realm="forespeak"'),))


def _host_name(host: str) -> str | None:
    try:
        return urlsplit("//" + host).hostname
    except ValueError:
        return None
