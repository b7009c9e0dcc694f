"""Who asks a machine for a stage: noticed when they leave."""

import fcntl
import resource
import socket
from collections.abc import Iterator

import pytest
from comfyui_tpu.fleet.serve import Asker, Gone

MANY = 1500  # select.select takes descriptors up to 1023


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= MANY:
        pytest.skip(f"this process may have {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MANY + 100), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_left_is_noticed_at_any_descriptor(many_descriptors: None):
    ours, theirs = socket.socketpair()
    with theirs, ours, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, MANY)) as connection:
        assert connection.fileno() >= MANY
        asker = Asker(connection, lambda content: None)
        asker.check_cancelled()
        theirs.send(b"more")
        asker.check_cancelled()
        connection.recv(4)
        theirs.close()
        with pytest.raises(Gone):
            asker.check_cancelled()
