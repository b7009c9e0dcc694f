"""Who may be on the line: the secret that both ends know, the machines that an owner lists, and certificates."""

import os
import re
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..redact import redact

VARIABLE, LISTED = "COMFYUI_TPU_TOKEN", "COMFYUI_TPU_REMOTES"
# Files in PEM: what a server shows, its key, and who signed what a client accepts.
CERTIFICATE, KEY, AUTHORITY = "COMFYUI_TPU_TLS_CERT", "COMFYUI_TPU_TLS_KEY", "COMFYUI_TPU_TLS_CA"
DEFAULT_PORT = 8190
_OTHERS = 0o077


class TrustError(ValueError):
    """A secret, an address or a certificate that is missing or cannot be used; a sentence for the user."""


def folder() -> Path:
    """The owner's settings of this machine: the files `token` and `remotes`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "comfyui-tpu"


def token() -> str:
    """The secret of this machine's links: `COMFYUI_TPU_TOKEN`, or the file `token`. TrustError where there is none."""
    if given := os.environ.get(VARIABLE, "").strip():
        return given
    path = folder() / "token"
    try:
        if path.stat().st_mode & _OTHERS:
            raise TrustError(f"{path} holds a secret, and others may read it: chmod 600 {path}")
        found = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    if not found:
        raise TrustError(
            f"There is no token, which both ends of a link must have: set {VARIABLE} to that of the other machine, "
            f"which printed it when it made it, or copy its file {path}."
        )
    return found


def make_token(say: Callable[[str], object]) -> str:
    """`token`; made, and said as the command for the other side, where there is none yet."""
    try:
        return token()
    except TrustError:
        path, made = folder() / "token", secrets.token_urlsafe(24)
        if path.exists():
            raise
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(made + "\n")
    except OSError as error:
        raise TrustError(f"{path} cannot be written ({error.strerror}). Set {VARIABLE} here and there.") from None
    say(f"A token was created and saved in {path}. On every other machine: export {VARIABLE}={made}")
    return made


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a machine listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Address:
    """HOST or HOST:PORT, also with http:// before it; ValueError for anything else."""
    found = re.fullmatch(r"(?:http://)?(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+))(?::(\d{1,5}))?/?", text.strip())
    port = int(found[3] or DEFAULT_PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise ValueError(
            f"address is {text!r}; it must be HOST or HOST:PORT of a machine that runs `comfyui-tpu serve`, such as "
            f"127.0.0.1:{DEFAULT_PORT}."
        )
    return Address(host=found[1] or found[2], port=port)


def check_listed(address: Address) -> None:
    """TrustError where the owner of this machine has not listed `address`: a workflow may name any."""
    path, lines = folder() / "remotes", os.environ.get(LISTED, "").split(",")
    try:
        lines += [line.partition("#")[0] for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        pass  # nothing is listed there
    if address not in [parse(line) for line in lines if line.strip()]:
        raise TrustError(
            f"{address} is not among the machines that this one's owner has listed, so neither the token nor prompts, "
            f"pictures or LoRAs are sent there. If it is yours, add the line {address} to {path}, or set {LISTED}."
        )


def server_tls() -> ssl.SSLContext | None:
    """What a server shows, where `COMFYUI_TPU_TLS_CERT` names a certificate."""
    if not (certificate := os.environ.get(CERTIFICATE)):
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, os.environ.get(KEY))
    except OSError as error:
        raise TrustError(f"{CERTIFICATE} and {KEY} name no certificate and its key ({redact(str(error))}).") from None
    return context


def client_tls() -> ssl.SSLContext | None:
    """Whom a client believes, where `COMFYUI_TPU_TLS_CA` names who signed the servers' certificates."""
    if not (authority := os.environ.get(AUTHORITY)):
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise TrustError(f"{AUTHORITY} names no certificate ({redact(str(error))}).") from None
