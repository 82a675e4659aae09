"""Names of client certificates: which entry of the token file a certificate matches."""

from __future__ import annotations

import ipaddress
import random
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from harness.certificates import Authority

from kvtier.server.auth.certificate_names import certificate_names, entry_name, pem_names
from kvtier.server.auth.credential_files import FileError
from kvtier.server.auth.tokens import read_token_file

DNS, URI, EMAIL = x509.DNSName, x509.UniformResourceIdentifier, x509.RFC822Name


def ip(text: str) -> x509.IPAddress:
    return x509.IPAddress(ipaddress.ip_address(text))


def raw(kind: Any, value: str) -> Any:
    """Returns a name with characters that the library would refuse."""
    name = kind("x.example")
    name._value = value
    return name


def pem_of(directory: Path, only: Sequence[x509.GeneralName], common: Sequence[str] = ("engine",)) -> bytes:
    return Path(Authority(directory).issue("c", common=common, only=only).cert).read_bytes()


@pytest.mark.parametrize(
    ("alternatives", "common", "names"),
    [
        ([DNS("engine.example")], ["engine"], ["dns:engine.example"]),
        ([DNS("Engine.EXAMPLE.")], [], ["dns:engine.example"]),
        ([URI("spiffe://Acme/A"), DNS("a"), ip("10.0.0.1"), ip("::1"), EMAIL("A@B.example")], ["a"],
         ["uri:spiffe://Acme/A", "dns:a", "ip:10.0.0.1", "ip:::1", "email:A@b.example"]),
        ([URI("engine.example")], [], ["uri:engine.example"]),
        ([DNS("*.example")], [], ["dns:*.example"]),
        ([DNS("xn--mnchen-3ya.example")], [], ["dns:xn--mnchen-3ya.example"]),
        ([raw(DNS, "a.example\0.b.example")], ["a"], []),
        ([raw(DNS, "a .example"), DNS("b")], ["a"], ["dns:b"]),
        ([raw(URI, "spiffe://a\n")], ["a"], []),
        ([x509.DirectoryName(x509.Name([]))], ["a"], []),
        ([x509.OtherName(x509.ObjectIdentifier("1.2.3"), b"\x0c\x01a")], ["a"], []),
        ([], ["engine"], ["cn:engine"]),
        ([], ["dns:engine"], ["cn:dns:engine"]),
        ([], ["münchen"], ["cn:münchen"]),
        ([], ["a", "b"], []),
        ([], ["a\0b"], []),
        ([], [], []),
    ],
)  # fmt: skip
def test_names_have_their_kind(tmp_path: Path, alternatives: Any, common: list[str], names: list[str]) -> None:
    """The common name counts only without alternative names, even if none of those is usable."""
    pem = pem_of(tmp_path, alternatives, common)
    assert certificate_names(ssl.PEM_cert_to_DER_cert(pem.decode())) == names
    assert list(pem_names(pem)) == names


def test_malformed_certificates_have_no_unexpected_names(tmp_path: Path) -> None:
    """A changed byte never raises an error."""
    der = ssl.PEM_cert_to_DER_cert(pem_of(tmp_path, [DNS("engine.example"), ip("10.0.0.1")]).decode())
    choose = random.Random(1)
    for _ in range(20_000):
        changed = bytearray(der)
        changed[choose.randrange(len(der))] = choose.randrange(256)
        certificate_names(bytes(changed[: choose.choice((len(der), choose.randrange(len(der))))]))
    assert certificate_names(b"") == certificate_names(None) == []
    assert pem_names(b"no certificate") == ()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("dns:Engine.Example.", "dns:engine.example"),
        ("ip:2001:DB8:0:0::1", "ip:2001:db8::1"),
        ("email:Me@Example.org", "email:Me@example.org"),
        ("uri:spiffe://acme/Engine", "uri:spiffe://acme/Engine"),
        ("cn:Engine 1", "cn:Engine 1"),
    ],
)
def test_an_entry_is_compared_in_its_canonical_form(text: str, name: str) -> None:
    assert entry_name(text) == name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("engine-1", "write the kind of the name, like"),
        ("spiffe://acme/engine", "write the kind of the name, like"),
        ("DNS:engine", "write the kind of the name, like"),
        ("dns:*.example", "wildcard"),
        ("dns:", "no name of the kind dns"),
        ("dns:münchen.example", "xn-- form"),
        ("dns:a\0b", "no name of the kind dns"),
        ("ip:10.0.0", "no name of the kind ip"),
        ("email:me", "no name of the kind email"),
        ("uri:", "no name of the kind uri"),
        ("cn:", "printable"),
    ],
)
def test_an_entry_that_can_match_nothing_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        entry_name(text)


def test_two_spellings_of_one_name_are_one_entry(tmp_path: Path) -> None:
    """Otherwise the order in the file would decide."""
    path = tmp_path / "tokens.toml"
    entry = '[[certificates]]\nname = "dns:{}"\ntenant = "{}"\nroles = ["engine"]\n'
    path.write_text(entry.format("engine", "a") + entry.format("Engine.", "b"))
    with pytest.raises(FileError, match="listed twice"):
        read_token_file(path)


def test_all_entries_of_a_certificate_are_found(tmp_path: Path) -> None:
    """Also expired ones: a certificate must not get other rights because an entry expires."""
    path = tmp_path / "tokens.toml"
    entry = '[[certificates]]\nname = "{}"\ntenant = "{}"\nroles = ["engine"]\n'
    path.write_text(entry.format("dns:a", "a") + "expires = 2020-01-01T00:00:00Z\n" + entry.format("uri:a", "b"))
    found = read_token_file(path).find_certificate(["dns:a", "uri:a", "ip:127.0.0.1"], 2e9)
    assert [None if each is None else each.tenant for each in found] == [None, "b"]
