"""Who may see the page and press its buttons: tokens, and pages of other sites that act in a visitor's name."""

import hmac
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gerl.commandline.listening import host_name, is_foreign, is_loopback

COOKIE = "gerl_watch"
MARK = "x-gerl"  # a header that only scripts of the page itself can send
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Access:
    """ASGI middleware. Without a token only requests that name this machine itself are answered."""

    app: ASGIApp
    token: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._refusal(request)
        opened = self.token is not None and refusal is None and "token" in request.query_params

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
                if opened:
                    headers.append("Set-Cookie", f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await (refusal or self.app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host = host_name(request.headers.get("host", ""))
        if self.token is None and not is_loopback(host):
            # a page elsewhere can have a name of its own point here, and would read along
            return refused(403, f"the page is at http://localhost, not at {host[:80]!r}; a token allows other names")
        if request.method not in ("GET", "HEAD"):
            if is_foreign(request.method, request.headers):
                return refused(403, "a page of another site may not do this")
            if MARK not in request.headers:
                return refused(403, f"the header {MARK} is missing, which the page sends")
        if self.token is not None and not any(self._is_token(given) for given in _given(request)):
            return refused(401, "open the page by the address that the command printed: it has the token")
        return None

    def _is_token(self, given: str) -> bool:
        assert self.token is not None
        return hmac.compare_digest(given.encode(), self.token.encode())


def _given(request: Request) -> list[str]:
    """The tokens that came with a request: as a cookie, a bearer token, or where the page is opened in its address."""
    kind, _, bearer = request.headers.get("authorization", "").partition(" ")
    found = [request.cookies.get(COOKIE), bearer.strip() if kind.lower() == "bearer" else None]
    if request.method == "GET" and request.url.path == "/":
        found.append(request.query_params.get("token"))
    return [given for given in found if given]


def refused(status: int, sentence: str) -> JSONResponse:
    """An answer that says why there is no other."""
    return JSONResponse({"error": sentence}, status)
