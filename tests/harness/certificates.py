"""Certificate authorities and certificates, made by tests with chosen validity."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["Authority", "Pair"]


class Pair:
    """Files of a certificate and its key."""

    def __init__(self, directory: Path, name: str) -> None:
        self.cert = str(directory / f"{name}.pem")
        self.key = str(directory / f"{name}.key")

    def write(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        """Writes both files, the key first."""
        pem = serialization.Encoding.PEM
        no_password = serialization.NoEncryption()
        Path(self.key).write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password))
        Path(self.cert).write_bytes(certificate.public_bytes(pem))


class Authority:
    """A certificate authority, valid between these days from now; `ca` is its certificate file."""

    def __init__(self, directory: Path, name: str = "ca", *, days: tuple[float, float] = (-1, 1)) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test {name}")])
        certificate = (
            _builder(self._name, self._name, self._key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = str(directory / f"{name}.pem")
        Path(self.ca).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        days: tuple[float, float] = (-1, 1),
        alternative: str | None = None,
        dns: str | None = None,
        common: Sequence[str] | None = None,
        only: Sequence[x509.GeneralName] | None = None,
    ) -> Pair:
        """Issues a certificate for 127.0.0.1 and a name, valid between these days from now.

        `common`: its common names instead of `name`. `only`: its alternative names instead of
        127.0.0.1 and those given; without any, it has no such extension.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        if alternative is not None:
            names.append(x509.UniformResourceIdentifier(alternative))
        if dns is not None:
            names.append(x509.DNSName(dns))
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        commons = [name] if common is None else common
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each) for each in commons])
        builder = _builder(subject, self._name, key, days).add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        names = names if only is None else list(only)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pair = Pair(self._directory, name)
        pair.write(certificate, key)
        return pair


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: tuple[float, float]
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    begin, end = (now + dt.timedelta(days=day) for day in days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )
