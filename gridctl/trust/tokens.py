"""One-time enrolment tokens: stored hashed, one node each, an hour of life.

`tokens/SHA256` is an open token, `tokens/SHA256.used` a spent one. Spending is one rename, so that of
two claims at the same moment one wins, whichever processes they come from.
"""

import hashlib
import json
import os
import secrets
from pathlib import Path

from gridagent.identity import write_file
from gridctl.trust.errors import TokenRefused

TTL_S = 3600.0
#: Spent and expired tokens are kept this long, so that a late claim is told why it fails.
_KEEP_S = 7 * 86400.0


def create(folder: Path, node: str, host: str, now_unix_s: float) -> str:
    """A new secret (256 random bits) that enrols `node`, serving at `host`, once, within `TTL_S`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.iterdir():
        if now_unix_s - path.stat().st_mtime > _KEEP_S:
            path.unlink(missing_ok=True)
    secret = secrets.token_urlsafe(32)
    record = {"node": node, "host": host, "expires_unix_s": now_unix_s + TTL_S}
    write_file(folder / _digest(secret), json.dumps(record).encode(), 0o600)
    return secret


def claim(folder: Path, secret: str, node: str, now_unix_s: float) -> str:
    """Spends a token for `node`. Returns the host where the node will serve. Raises `TokenRefused`."""
    path = folder / _digest(secret)
    used = path.with_suffix(".used")
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        why = "was used before" if used.exists() else "is unknown here, or was withdrawn"
        raise TokenRefused(f"the token {why}: make a new one with `gridctl enroll`") from None
    if now_unix_s > record["expires_unix_s"]:
        raise TokenRefused("the token has expired: make a new one with `gridctl enroll`")
    if record["node"] != node:
        raise TokenRefused(f"the token is for node {record['node']}, not for {node!a}")
    try:
        os.rename(path, used)
    except FileNotFoundError:
        raise TokenRefused("the token was used before: make a new one with `gridctl enroll`") from None
    return str(record["host"])


def withdraw(folder: Path, node: str) -> None:
    """Makes every open token of a node useless."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.suffix and json.loads(path.read_bytes())["node"] == node:
            path.unlink(missing_ok=True)


def _digest(secret: str) -> str:
    # A plain hash is enough: a secret of 256 random bits cannot be guessed from it.
    return hashlib.sha256(secret.encode()).hexdigest()
