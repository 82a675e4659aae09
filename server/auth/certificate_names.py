"""Names in client certificates, with their kind, and names of certificates in the token file.

A name is written `KIND:VALUE`: two kinds with the same value are different names.

| kind | name in the certificate | comparison |
|---|---|---|
| `dns` | alternative name of type DNS | without case, and without a final dot |
| `uri` | alternative name of type URI | exact |
| `ip` | alternative name of type IP | as an address |
| `email` | alternative name of type email | the domain without case |
| `cn` | common name, only if the certificate has no alternative names (RFC 6125, 6.4.4) | exact |

A name in a certificate that contains other characters than its kind permits (NUL, spaces, letters
beyond ASCII except in a common name) matches no entry. A wildcard is not expanded.

TLS has verified a certificate before it is read here. The parser does not depend on the connection:
gRPC and the socket protocol get the same names from the same certificate.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import ssl
from collections.abc import Iterator

__all__ = ["certificate_names", "entry_name", "pem_names"]

_HOW = 'write the kind of the name, like "dns:engine-1.acme.example", "uri:…", "ip:…", "email:…" or "cn:…"'
_LABEL = r"(?!-)[a-z0-9_-]{1,63}"
_DNS = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_VISIBLE = re.compile(r"[!-~]+", re.ASCII)
_KIND_OF_TAG = {0x81: "email", 0x82: "dns", 0x86: "uri", 0x87: "ip"}
_TEXTS = {0x0C: "utf-8", 0x13: "ascii", 0x16: "ascii"}
"""Encodings of UTF8String, PrintableString and IA5String."""
_OID, _VERSION, _EXTENSIONS = 0x06, 0xA0, 0xA3
_COMMON_NAME, _ALTERNATIVE_NAMES = b"\x55\x04\x03", b"\x55\x1d\x11"
_SUBJECT = 4
"""Position in a certificate without its optional version: number, algorithm, issuer, validity."""


def certificate_names(certificate: bytes | None) -> list[str]:
    """Returns the names of a certificate in DER; none if it is missing or malformed."""
    if certificate is None:
        return []
    try:
        ((_, whole),) = _elements(certificate)
        fields = list(_elements(next(_elements(whole))[1]))
        if fields[0][0] == _VERSION:
            del fields[0]
        extensions = [value for tag, value in fields if tag == _EXTENSIONS]
        found = [value for each in extensions for value in _alternative_names(each)]
        if found:
            ((_, names),) = _elements(found[0])
            # Two such extensions are malformed. An extension without names counts as one.
            return [name for tag, raw in _elements(names) if (name := _name(tag, raw))] if len(found) == 1 else []
        commons = list(_common_names(fields[_SUBJECT][1]))
    except (ValueError, IndexError, StopIteration):
        return []
    return [f"cn:{commons[0]}"] if len(commons) == 1 and commons[0].isprintable() else []


@functools.lru_cache(maxsize=1024)
def pem_names(certificate: bytes) -> tuple[str, ...]:
    """Returns the names of a certificate in PEM, as gRPC has it."""
    try:
        return tuple(certificate_names(ssl.PEM_cert_to_DER_cert(certificate.decode())))
    except ValueError:
        return ()


def entry_name(text: str) -> str:
    """Returns the name of an entry of the token file, as it is compared. Raises `ValueError`."""
    kind, colon, value = text.partition(":")
    if not colon or kind not in {"cn", *_KIND_OF_TAG.values()}:
        raise ValueError(_HOW)
    if "*" in value and kind == "dns":
        raise ValueError("a wildcard matches no name: list each name")
    if kind == "cn":
        if not value.isprintable() or not value:
            raise ValueError("a common name must be printable")
        return text
    try:
        raw = ipaddress.ip_address(value).packed if kind == "ip" else value.encode("ascii")
    except ValueError:
        hint = " (write the xn-- form of an international name)" if kind in ("dns", "email") else ""
        raise ValueError(f"{value!r} is no name of the kind {kind}{hint}") from None
    name = _name(next(tag for tag, each in _KIND_OF_TAG.items() if each == kind), raw)
    if not name:
        raise ValueError(f"{value!r} is no name of the kind {kind}")
    return name


def _name(tag: int, raw: bytes) -> str:
    """Returns an alternative name as it is compared; "" if it is malformed or of another type."""
    kind = _KIND_OF_TAG.get(tag, "")
    if kind == "ip":
        return f"ip:{ipaddress.ip_address(raw)}" if len(raw) in (4, 16) else ""
    value = raw.decode("latin-1")
    if not kind or not _VISIBLE.fullmatch(value):
        return ""
    if kind == "dns":
        value = value.lower().removesuffix(".")
        return f"dns:{value}" if _DNS.fullmatch(value) else ""
    if kind == "email":
        local, at, domain = value.rpartition("@")
        return f"email:{local}@{domain.lower()}" if local and at and domain else ""
    return f"uri:{value}"


def _alternative_names(extensions: bytes) -> Iterator[bytes]:
    ((_, listed),) = _elements(extensions)
    for _, extension in _elements(listed):
        fields = list(_elements(extension))
        if fields[0] == (_OID, _ALTERNATIVE_NAMES):
            yield fields[-1][1]


def _common_names(subject: bytes) -> Iterator[str]:
    for _, attributes in _elements(subject):
        for _, attribute in _elements(attributes):
            (oid, (tag, value)) = _elements(attribute)
            if oid == (_OID, _COMMON_NAME):
                yield value.decode(_TEXTS[tag]) if tag in _TEXTS else ""


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields tag and content of consecutive elements in DER. Raises `ValueError`, `IndexError`."""
    at = 0
    while at < len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            count = length & 0x7F
            if not 1 <= count <= 4:
                raise ValueError("not the length of an element")
            length, at = int.from_bytes(data[at : at + count], "big"), at + count
        if tag & 0x1F == 0x1F or at + length > len(data):
            raise ValueError("not an element")
        yield tag, data[at : at + length]
        at += length
