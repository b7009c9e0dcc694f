"""`setup.py start`: replaces this process with ComfyUI, with the necessary flags and environment."""

import argparse
import errno
import getpass
import os
import socket
from collections.abc import Sequence

from .install import start_environment, verb
from .layout import Installation, find_installation
from .lock import lock_shared
from .terminal import SetupError, say

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DESCRIPTION = """\
Starts ComfyUI from the folder that `install` set up. Arguments after `--` are passed to ComfyUI's main.py.\
"""


def main(arguments: Sequence[str]) -> int:
    """Starts ComfyUI; arguments after -- are passed to it"""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    options, comfyuis = _options(words[:end]), words[end + 1 :]
    chosen = find_installation(options.comfyui)
    command = _command(chosen, options, comfyuis)
    _refuse(chosen, options, comfyuis)
    if options.hosts:
        command = [*_follow(chosen, options.hosts), "--", *command]
    _announce(options.listen, options.port)
    os.chdir(chosen.comfyui)
    with lock_shared(chosen):
        os.execve(command[0], command, start_environment(chosen))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = verb("start", _DESCRIPTION, changes=False)
    parser.add_argument("--listen", metavar="ADDRESS", default="127.0.0.1", help="default: %(default)s, this machine")
    parser.add_argument("--port", type=int, default=8188, help="default: %(default)s")
    parser.add_argument(
        "--hosts",
        nargs="?",
        const="auto",
        metavar="N/M@HOST:PORT",
        help="for a TPU with several hosts: the first runs ComfyUI, the others follow, and all restart if one is lost. "
        "Not on a TPU: number N of this host (from 0) of M, and the address of host 0",
    )
    return parser.parse_args(arguments)


def _command(chosen: Installation, options: argparse.Namespace, comfyuis: Sequence[str]) -> list[str]:
    # --cpu is about ComfyUI's own PyTorch; the pack finds the TPU by itself.
    flags = ["--cpu", "--preview-method", "auto", "--listen", options.listen, "--port", str(options.port)]
    if chosen.manager_requirements.is_file():  # an older ComfyUI does not have the flag
        flags.append("--enable-manager")
    return [chosen.venv.python, "main.py", *flags, *comfyuis]


def _follow(chosen: Installation, hosts: str) -> list[str]:
    """Return the command that runs ComfyUI on the first of several hosts, follows it on others, and restarts both."""
    program = chosen.venv.program("comfyui-tpu")
    if hosts == "auto":
        return [program, "follow"]
    process, _, rest = hosts.partition("/")
    count, separator, coordinator = rest.partition("@")
    if not (separator and process.isdecimal() and count.isdecimal()):
        raise SetupError(f"--hosts {hosts}: it must be N/M@HOST:PORT such as 0/2@10.0.0.2:8476, or nothing on a TPU.")
    return [program, "follow", "--coordinator", coordinator, "--process", process, "--of", count]


def _refuse(chosen: Installation, options: argparse.Namespace, comfyuis: Sequence[str]) -> None:
    for name in ("--listen", "--port"):
        if any(word.partition("=")[0] == name for word in comfyuis):
            raise SetupError(f"{name} is an option of `setup.py start` itself: give it before the `--`.")
    if not chosen.constraints.is_file() or not chosen.venv.is_usable(any_python=True):
        raise SetupError(
            f"The installation in {chosen.comfyui} is not complete: python3 setup.py install --comfyui {chosen.comfyui}"
        )
    try:
        family, *_, address = socket.getaddrinfo(options.listen, options.port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SetupError(
                f"Port {options.port} is in use, perhaps by a ComfyUI that is already running: end it, or choose "
                "another with --port N."
            ) from None
        raise SetupError(f"Cannot listen at {options.listen}, port {options.port}: {error.strerror}.") from None


def _announce(address: str, port: int) -> None:
    if address not in LOOPBACK:
        say(
            f"WARNING: anyone who can reach {address}, port {port}, can run programs here as you: ComfyUI asks for no "
            "password, and Manager installs code. Without --listen, only this machine and ssh tunnels reach it."
        )
    host = "127.0.0.1" if address in ("0.0.0.0", "::", *LOOPBACK) else address
    tunnel = f"-N -L {port}:{host}:{port}"
    say(f"ComfyUI's page will be at http://{host}:{port} (Ctrl-C ends it)")
    say(f"from your own machine: ssh {tunnel} {_user()}@HOST, then open http://127.0.0.1:{port}")
    say(f"          on a TPU VM: gcloud compute tpus tpu-vm ssh NAME --zone ZONE -- {tunnel}")


def _user() -> str:
    """Return the name to log in with; users of containers may have none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "USER"
