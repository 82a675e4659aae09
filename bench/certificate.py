"""Certificate of 127.0.0.1 for benchmarks of TLS; its own CA."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvtier.protos.credentials import Credentials

__all__ = ["Certificate"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files of a certificate that server and client use."""

    cert: str
    key: str

    @classmethod
    def write(cls, directory: Path) -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bench")])
        now = dt.datetime.now(dt.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        files = cls(str(directory / "bench.pem"), str(directory / "bench.key"))
        Path(files.cert).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        Path(files.key).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    @property
    def credentials(self) -> Credentials:
        """Credentials of a client that uses TLS with this certificate."""
        return Credentials(ca=self.cert, cert=self.cert, key=self.key)

    @property
    def settings(self) -> str:
        """Settings of a server that requires this certificate from its clients."""
        return f'[tls]\ncert = "{self.cert}"\nkey = "{self.key}"\nclient_ca = "{self.cert}"\n'
