"""Who may call: bearer tokens and certificates, the same for both doors."""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from disagg.config import GatewaySettings, TlsSettings
from disagg.errors import ConfigError

HOW_TO_CALL = "a valid bearer token is needed: authorization: Bearer TOKEN"
MIN_TOKEN_CHARS = 16
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class TokenCheck:
    """Compares an Authorization header with the known tokens, in a time that does not tell how much of one was right."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._expected = [f"Bearer {token}".encode() for token in tokens]

    @classmethod
    def of(cls, settings: GatewaySettings) -> TokenCheck | None:
        """The check that the topology asks for; None when everybody may call. Raises ConfigError for an unusable file."""
        if settings.token_file is None:
            return None
        lines = _read("gateway.token_file", settings.token_file).decode(errors="replace").splitlines()
        tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        short = [token for token in tokens if len(token) < MIN_TOKEN_CHARS]
        if not tokens or short:
            wrong = f"a token of {len(short[0])} characters" if short else "no token"
            expected = f"tokens of at least {MIN_TOKEN_CHARS} characters, one a line"
            raise ConfigError(
                f"gateway.token_file: {settings.token_file} holds {wrong}; expected {expected}",
                key="gateway.token_file",
                value=settings.token_file,
                expected=expected,
            )
        return cls(tokens)

    def __call__(self, header: str) -> bool:
        given = header.encode(errors="replace")
        # All are compared, whichever fits.
        return sum(hmac.compare_digest(given, expected) for expected in self._expected) > 0


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a token. Health stays open: probes of balancers have none."""

    def __init__(self, check: TokenCheck) -> None:
        self._check = check

        async def refuse(request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, HOW_TO_CALL)

        self._refuse: Any = grpc.unary_unary_rpc_method_handler(refuse)
        self._refuse_stream: Any = grpc.stream_stream_rpc_method_handler(refuse)
        self._refuse_answer_stream: Any = grpc.unary_stream_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method.startswith(f"/{_HEALTH}/"):
            return await continuation(details)
        header = next((value for key, value in details.invocation_metadata if key == "authorization"), "")
        if isinstance(header, str) and self._check(header):
            return await continuation(details)
        handler = await continuation(details)
        if handler is None or not (handler.request_streaming or handler.response_streaming):
            return self._refuse
        return self._refuse_stream if handler.request_streaming else self._refuse_answer_stream


def grpc_credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    """Raises ConfigError for files that cannot be read."""
    client_ca = _read("gateway.tls.client_ca", tls.client_ca) if tls.client_ca is not None else None
    pair = (_read("gateway.tls.key", tls.key), _read("gateway.tls.cert", tls.cert))
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)


def http_context(tls: TlsSettings) -> ssl.SSLContext:
    """Raises ConfigError for files that are not a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"gateway.tls: {error.strerror or error}", key="gateway.tls", value=tls.cert, expected="PEM files of a certificate and its key"
        ) from error
    return context


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}", key=key, value=path, expected="a file on the gateway's host") from error
