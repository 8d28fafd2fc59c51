"""The operating system's keyring: which ones may hold a key of ours, and their errors as ours."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gridctl.trust.errors import KeyringIsLocked, KeyringUnavailable

if TYPE_CHECKING:
    from keyring.backend import KeyringBackend

#: Keyrings that encrypt at rest and are opened by the user's login. Anything else is refused.
_BACKENDS = frozenset(
    {
        "keyring.backends.SecretService.Keyring",
        "keyring.backends.libsecret.Keyring",
        "keyring.backends.kwallet.DBusKeyring",
        "keyring.backends.macOS.Keyring",
        "keyring.backends.Windows.WinVaultKeyring",
    }
)


def backend() -> "KeyringBackend":
    """The keyring to use. Raises `KeyringUnavailable` where it is none of the known, encrypted ones."""
    import keyring
    from keyring.backends.chainer import ChainerBackend

    chosen = keyring.get_keyring()
    candidates = list(chosen.backends) if isinstance(chosen, ChainerBackend) else [chosen]
    for candidate in candidates:
        if name(candidate) in _BACKENDS:
            return candidate
    names = ", ".join(map(name, candidates))
    if names in ("keyring.backends.fail.Keyring", ""):
        raise KeyringUnavailable("no keyring service runs here")
    raise KeyringUnavailable(f"the keyring {names} is not one that may hold a key")


def name(backend: "KeyringBackend") -> str:
    """What a backend is, as a dotted name."""
    return f"{type(backend).__module__}.{type(backend).__qualname__}"


def call(backend: "KeyringBackend", act: Callable[[], Any]) -> Any:
    """Runs one call of a backend; whatever it raises becomes an error of ours."""
    from keyring.errors import KeyringLocked

    try:
        return act()
    except KeyringLocked as error:
        raise KeyringIsLocked(
            f"the keyring is locked ({error}): unlock it (log in on the desktop, or start the keyring"
            " daemon with its password) and run this again"
        ) from None
    except Exception as error:  # backends raise their own: D-Bus, secretstorage, OS errors
        raise KeyringUnavailable(f"the keyring {name(backend)} failed ({error})") from None
