"""All that decides who may come in, made of the configuration: certificate, tokens, roles, rates, audit."""

from __future__ import annotations

import grpc

from .auth.audit_log import AuditLog
from .auth.authenticator import Authenticator, AuthInterceptor
from .auth.rate_limits import RateLimiters
from .auth.tls import TlsError, server_credentials
from .auth.tokens import TokensError
from .config.schema import Config
from .rpc.sessions import SessionRegistry

__all__ = ["AccessControl", "AccessError"]


class AccessError(Exception):
    """A file of tokens, or a certificate, cannot be used; one line."""


class AccessControl:
    """What the server's doors ask. Where nobody is asked who he is, `authority` and `gate` are None, and calls cost nothing more.

    Raises:
        TrustError: see there.
    """

    def __init__(self, config: Config) -> None:
        tls = config.tls
        try:
            self.credentials: grpc.ServerCredentials | None = (
                server_credentials(str(tls.cert), str(tls.key), str(tls.client_ca) if tls.client_ca else None)
                if tls.cert is not None and tls.key is not None
                else None
            )
            self.authority = Authenticator(config) if Authenticator.is_wanted(config) else None
        except (TlsError, TokensError) as error:
            raise AccessError(str(error)) from None
        self.audit = AuditLog(looks=self.authority is not None)
        self.gate = AuthInterceptor(self.authority) if self.authority is not None else None
        self.meters = RateLimiters(config.rates, {tenant.name: tenant.rates for tenant in config.tenants})
        self._metrics = config.auth.metrics

    def may_see_metrics(self, header: str | None) -> bool:
        """Returns whether an HTTP request with this `Authorization` may see the metrics. Any thread may ask."""
        return not self._metrics or (self.authority is not None and self.authority.may_see_metrics(header))

    def look_again(self, sessions: SessionRegistry) -> None:
        """Reads the tokens again if they have changed, and ends the sessions of those that are not valid any more."""
        if self.authority is not None:
            self.authority.refresh()
            sessions.revoke(self.authority.still)
