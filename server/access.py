"""Access control of the server: TLS credentials, authentication, rate limits and the audit log."""

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
    """A token file or certificate cannot be used; the message is one line."""


class AccessControl:
    """Access control built from the configuration. Construction raises `AccessError`.

    Without authentication `authenticator` and `authorize` are None, so calls have no extra cost.
    """

    def __init__(self, config: Config) -> None:
        tls = config.tls
        try:
            self.credentials: grpc.ServerCredentials | None = (
                server_credentials(str(tls.cert), str(tls.key), str(tls.client_ca) if tls.client_ca else None)
                if tls.cert is not None and tls.key is not None
                else None
            )
            self.authenticator = Authenticator(config) if Authenticator.is_required(config) else None
        except (TlsError, TokensError) as error:
            raise AccessError(str(error)) from None
        self.audit_log = AuditLog(logs_reads=self.authenticator is not None)
        self.authorize = AuthInterceptor(self.authenticator) if self.authenticator is not None else None
        self.rate_limiters = RateLimiters(config.rates, {tenant.name: tenant.rates for tenant in config.tenants})
        self._metrics_need_token = config.auth.metrics

    def may_see_metrics(self, header: str | None) -> bool:
        """Returns whether an HTTP request with this `Authorization` header may see the metrics. Thread-safe."""
        if not self._metrics_need_token:
            return True
        return self.authenticator is not None and self.authenticator.may_see_metrics(header)

    def refresh(self, sessions: SessionRegistry) -> None:
        """Reads changed tokens again, and ends the sessions whose credentials are no longer valid."""
        if self.authenticator is not None:
            self.authenticator.refresh()
            sessions.revoke(self.authenticator.is_still_valid)
