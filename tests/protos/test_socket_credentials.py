"""Credentials of connections of the socket protocol."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from harness.certificates import Authority

from kvtier.client import Credentials
from kvtier.protos.credentials import CredentialsError
from kvtier.protos.wire.socket_frames import CALLS_PROTOCOL


def test_certificates_are_verified_as_by_grpc(tmp_path: Path) -> None:
    """An intermediate CA suffices, and VERIFY_X509_STRICT (Python 3.13) does not apply."""
    context = Credentials(ca=Authority(tmp_path).ca).socket_context(CALLS_PROTOCOL)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.verify_flags & ssl.VERIFY_X509_PARTIAL_CHAIN
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3


def test_the_last_token_stays_if_its_file_is_unreadable(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    credentials = Credentials(token_file=str(file))
    assert credentials.socket_token() == "first"
    file.write_text("second\n")
    assert credentials.socket_token() == "second"
    file.unlink()
    assert credentials.socket_token() == "second"


def test_credentials_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError):
        Credentials(ca=str(tmp_path / "missing")).socket_context(CALLS_PROTOCOL)
    with pytest.raises(CredentialsError):
        Credentials(token_file=str(tmp_path / "missing")).socket_token()
