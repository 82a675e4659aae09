"""Whether files have what TLS wants of them, in words for people: gRPC says nothing, and then does not connect."""

from __future__ import annotations

import ssl

__all__ = ["PairError", "PemError", "check_certificates", "check_pair"]

_MISMATCH = "KEY_VALUES_MISMATCH"
_SAYINGS = {
    _MISMATCH: f"the key is not this certificate's ({_MISMATCH})",
    "NO_CERTIFICATE_OR_CRL_FOUND": "there is none in it",
}


class PemError(ValueError):
    """A file cannot be used; the message says why, and does not name it."""


class PairError(PemError):
    """A key is another certificate's, or has a password: whoever reads the files, they are of no use."""


def check_certificates(path: str) -> None:
    """Raises PemError if a file has no certificates, or damaged ones."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:  # ssl.SSLError is one
        raise PemError(f"not certificates in PEM: {_said(error, 'damaged')}") from None


def check_pair(cert: str, key: str, context: ssl.SSLContext) -> None:
    """Loads a certificate, of which `check_certificates` thinks well, with its key. Raises PemError, PairError."""
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except PairError:
        raise
    except (OSError, ValueError) as error:
        if getattr(error, "reason", "") == _MISMATCH:
            raise PairError(_SAYINGS[_MISMATCH]) from None
        raise PemError(_said(error, "the key is not a private key in PEM")) from None


def _no_password() -> str:
    raise PairError("the key has a password")


def _said(error: Exception, otherwise: str) -> str:
    if isinstance(error, ssl.SSLError):
        return _SAYINGS.get(error.reason or "", error.reason or otherwise)
    return (isinstance(error, OSError) and error.strerror) or str(error)
