"""The way to a receiver: HTTPS or mail. What was sent is the caller's to keep."""

import asyncio
import hmac
import os
import smtplib
import ssl
import time
from email.message import EmailMessage
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from gridctl.errors import GridctlError
from gridctl.notify import messages
from gridctl.notify.config import Receiver
from gridctl.notify.messages import Message

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 10.0
#: An acknowledged alert is silenced for so long in Alertmanager, or until it is over.
ACKED_S = 7 * 86400.0
_SECRET_BYTES_MAX = 64 * 1024


class NotTold(GridctlError):
    """A receiver did not take a notice. `again_s`: when it wants to be asked again; 0: it does not say."""

    def __init__(self, text: str, again_s: float = 0.0) -> None:
        super().__init__(text)
        self.again_s = again_s


def resolve(text: str) -> str:
    """What "env:NAME" and "file:PATH" stand for; any other text is meant as it is. Raises `NotTold`."""
    kind, _, rest = text.partition(":")
    if kind == "env":
        if not (value := os.environ.get(rest, "").strip()):
            raise NotTold(f"the environment variable {rest} of the controller is empty or not set")
        return value
    if kind == "file":
        try:
            return Path(rest).read_bytes()[:_SECRET_BYTES_MAX].decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise NotTold(f"{rest} cannot be read: {error}") from None
    return text


async def send(receiver: Receiver, message: Message) -> None:
    """Tells a receiver. Raises `NotTold`; then it may be tried again, and may have got it all the same."""
    url, secret = resolve(receiver.url), resolve(receiver.secret)
    if receiver.kind == "mail":
        await asyncio.to_thread(_mail, receiver, message, url, secret)
        return
    import httpx

    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, verify=_context(receiver)) as http:
            await _post(http, receiver, message, url, secret)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        # An address may hold a secret: only where it leads is said.
        raise NotTold(f"{_place(url)}: {type(error).__name__}: {error}".replace(url, _place(url))) from None


async def _post(
    http: "httpx.AsyncClient", receiver: Receiver, message: Message, url: str, secret: str
) -> None:
    now_unix_s = time.time()
    if receiver.kind == "alertmanager":
        root = url.rstrip("/")
        await _ask(http, f"{root}/api/v2/alerts", messages.alerts(message, now_unix_s), secret)
        if message.notice.event == "acked":
            for body in messages.alert_silence(message, now_unix_s, now_unix_s + ACKED_S):
                await _ask(http, f"{root}/api/v2/silences", body, secret)
    elif receiver.kind == "pagerduty":
        await _ask(http, url, messages.pagerduty(message, secret))
    elif receiver.kind == "slack":
        await _ask(http, url, messages.slack(message), secret)
    else:
        await _ask(http, url, messages.webhook(message), signing=secret)


async def _ask(
    http: "httpx.AsyncClient", url: str, body: Any, bearer: str = "", *, signing: str = ""
) -> None:
    content = msgspec.json.encode(body)
    headers = {"Content-Type": "application/json", "User-Agent": "gridctl"}
    if bearer:
        headers["Authorization"] = f"Bearer {bearer}"
    if signing:
        headers["X-Gridctl-Signature"] = f"sha256={hmac.digest(signing.encode(), content, 'sha256').hex()}"
    answer = await http.post(url, content=content, headers=headers)
    if not answer.is_success:
        said = messages.one_line(answer.text[:200])
        wait = answer.headers.get("Retry-After", "")
        again_s = float(wait) if wait.isascii() and wait.isdecimal() and len(wait) < 7 else 0.0
        raise NotTold(f"{_place(url)} answers {answer.status_code}: {said}", again_s)


def _mail(receiver: Receiver, message: Message, url: str, password: str) -> None:
    """By SMTP; with STARTTLS wherever the server offers it, and never a password without TLS."""
    where = urlsplit(url)
    tls = where.scheme == "smtps"
    host, port = where.hostname or "", where.port or (465 if tls else 25)
    try:
        context = _context(receiver)
        if tls:
            server: smtplib.SMTP = smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_S, context=context)
        else:
            server = smtplib.SMTP(host, port, timeout=TIMEOUT_S)
        with server:
            server.ehlo()
            if not tls and server.has_extn("starttls"):
                server.starttls(context=context)
                server.ehlo()
                tls = True
            if receiver.user:
                if not tls:
                    raise NotTold(f"{_place(url)} offers no TLS, and a password is not sent without it")
                server.login(receiver.user, password)
            server.send_message(letter(receiver, message))
    except (smtplib.SMTPException, OSError, ValueError) as error:
        raise NotTold(f"{_place(url)}: {type(error).__name__}: {error}") from None


def letter(receiver: Receiver, message: Message) -> EmailMessage:
    """A notice as a mail: plain text."""
    own, first = messages.mail_ids(message.notice)
    mail = EmailMessage()
    mail["From"] = receiver.sender
    mail["To"] = ", ".join(receiver.to)
    mail["Subject"] = message.subject
    mail["Message-ID"] = own
    mail["References"] = first
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(message.text + "\n")
    return mail


def _context(receiver: Receiver) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=receiver.ca or None)


def _place(url: str) -> str:
    """Where an address leads, without its path, its query and whatever else may be secret."""
    where = urlsplit(url)
    return f"{where.scheme}://{where.hostname or '?'}" + (f":{where.port}" if where.port else "")
