"""Authentication: the shared secret, the machines that an owner has listed, and TLS certificates."""

import os
import re
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...tpu_runtime.messages import compose
from ...tpu_runtime.redact import redact

TOKEN_VARIABLE, REMOTES_VARIABLE = "COMFYUI_TPU_TOKEN", "COMFYUI_TPU_REMOTES"
# PEM files: a server's certificate, its key, and the authority that a client accepts.
TLS_CERT_VARIABLE, TLS_KEY_VARIABLE, TLS_CA_VARIABLE = (
    "COMFYUI_TPU_TLS_CERT",
    "COMFYUI_TPU_TLS_KEY",
    "COMFYUI_TPU_TLS_CA",
)
DEFAULT_PORT = 8190
_OTHERS = 0o077


class AuthError(ValueError):
    """A secret, an address or a certificate is missing or invalid; the message is a sentence for the user."""


def config_folder() -> Path:
    """Return the folder of this machine's settings, with the files `token` and `remotes`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "comfyui-tpu"


def read_token() -> str:
    """Return the shared secret: `COMFYUI_TPU_TOKEN`, or the file `token`. Raises TrustError if there is neither."""
    if secret := os.environ.get(TOKEN_VARIABLE, "").strip():
        return secret
    path = config_folder() / "token"
    try:
        if path.stat().st_mode & _OTHERS:
            raise AuthError(compose("remote.token_readable_by_others", path=path))
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        secret = ""
    if not secret:
        raise AuthError(compose("remote.no_token", token_variable=TOKEN_VARIABLE, path=path))
    return secret


def ensure_token(say: Callable[[str], object]) -> str:
    """Return the shared secret, or create it and pass the command for other machines to `say`."""
    try:
        return read_token()
    except AuthError:
        path, made = config_folder() / "token", secrets.token_urlsafe(24)
        if path.exists():
            raise
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(made + "\n")
    except OSError as error:
        raise AuthError(
            compose("remote.token_not_writable", path=path, strerror=error.strerror, token_variable=TOKEN_VARIABLE)
        ) from None
    say(f"A token was created and saved in {path}. On every other machine: export {TOKEN_VARIABLE}={made}")
    return made


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address at which a machine listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse HOST or HOST:PORT, optionally with http://. Raises ValueError for anything else."""
    match = re.fullmatch(r"(?:http://)?(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+))(?::(\d{1,5}))?/?", text.strip())
    port = int(match[3] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise ValueError(compose("remote.address_malformed", text=repr(text), default_port=DEFAULT_PORT))
    return Address(host=match[1] or match[2], port=port)


def check_listed(address: Address) -> None:
    """Raise TrustError if the owner of this machine has not listed `address`: a workflow may name any address."""
    path, lines = config_folder() / "remotes", os.environ.get(REMOTES_VARIABLE, "").split(",")
    try:
        lines += [line.partition("#")[0] for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        pass  # nothing is listed there
    if address not in [parse_address(line) for line in lines if line.strip()]:
        raise AuthError(
            compose("remote.address_not_listed", address=address, path=path, remotes_variable=REMOTES_VARIABLE)
        )


def make_server_tls() -> ssl.SSLContext | None:
    """Return the TLS context of a server, if `COMFYUI_TPU_TLS_CERT` names a certificate; else None."""
    if not (certificate := os.environ.get(TLS_CERT_VARIABLE)):
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, os.environ.get(TLS_KEY_VARIABLE))
    except OSError as error:
        raise AuthError(compose(
            "remote.certificate_or_key_wrong", tls_cert_variable=TLS_CERT_VARIABLE, tls_key_variable=TLS_KEY_VARIABLE,
            error=redact(str(error)),
        )) from None  # fmt: skip
    return context


def make_client_tls() -> ssl.SSLContext | None:
    """Return the TLS context of a client, if `COMFYUI_TPU_TLS_CA` names an authority; else None."""
    if not (authority := os.environ.get(TLS_CA_VARIABLE)):
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise AuthError(
            compose("remote.authority_not_certificate", tls_ca_variable=TLS_CA_VARIABLE, error=redact(str(error)))
        ) from None
