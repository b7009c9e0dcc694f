"""A leader and a follower in one process, without chips: an attempt ends on both in the same way, whatever happens."""

import asyncio
import contextlib
import gc
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comfyui_tpu.distributed.multihost import distributed, handshake, leader
from comfyui_tpu.distributed.multihost.coordinator import HostGroup, HostsError, RemoteAttemptFailed
from comfyui_tpu.distributed.multihost.follower import Follower
from comfyui_tpu.distributed.multihost.leader import Leader
from comfyui_tpu.distributed.multihost.rank import HostRank
from comfyui_tpu.distributed.rpc import auth, connection
from comfyui_tpu.distributed.rpc.connection import HandshakeRejected
from comfyui_tpu.distributed.rpc.messages import LogLine
from comfyui_tpu.tests.support.host import Cancelled, Host
from comfyui_tpu.tests.support.hosts import free_port
from comfyui_tpu.tests.support.messages import Expected, assert_message, raises_message
from comfyui_tpu.tests.support.patience import PATIENCE_S, until


class Pair:
    """The two, and what became of them: `ends` are the leader's last words, `left` the follower's."""

    def __init__(self) -> None:
        port, self.ends, self.left, self.host, self.is_joined = free_port(), [], [], Host(), False
        self.address = auth.Address(host="127.0.0.1", port=port)
        places = [HostRank(process=process, count=2, address=self.address) for process in range(2)]
        self.leader = Leader(places[0], lambda sentence, stuck: self.ends.append((sentence, stuck)))
        self.follower = Follower(places[1])

    def join(self) -> None:
        joining = threading.Thread(target=self.follower.join)
        joining.start()
        with self.leader.join(self.host):
            joining.join(PATIENCE_S)
        self.is_joined = True

    def attempt(self, lead: Callable[[], Any], follow: Callable[[], Any]) -> list[Any]:
        """What both gave or raised."""
        outcomes: list[Any] = [None, None]

        def run(side: int, host: HostGroup, work: Callable[[], Any]) -> None:
            try:
                with host.attempt(lambda error: "again" if "memory" in str(error) else "failed"):
                    outcomes[side] = work()
            except Exception as error:
                outcomes[side] = error

        following = threading.Thread(target=run, args=(1, self.follower, follow))
        following.start()
        with self.leader.stage("encode", {}, self.host):
            run(0, self.leader, lead)
        following.join(PATIENCE_S)
        return outcomes


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    found = Pair()
    monkeypatch.setattr(distributed, "initialize", lambda place: None)
    monkeypatch.setattr(Follower, "_end", lambda self, why: found.left.append(why))
    monkeypatch.setattr(handshake, "apply_environment", lambda environment: None)
    yield found
    found.leader.close()
    if found.is_joined:
        until(lambda: found.left)  # before its way to end is the real one again


def fails(sentence: str, kind: type[Exception] = ValueError) -> Callable[[], None]:
    def work() -> None:
        raise kind(sentence)

    return work


def test_attempt_ends_in_same_way_on_leader_and_follower(pair: Pair):
    pair.join()
    agree = [lambda: pair.leader.barrier("run it", 1), lambda: pair.follower.barrier("run it", 1)]
    assert pair.attempt(*agree) == [True, True]
    assert pair.attempt(agree[0], lambda: pair.follower.barrier("run it", 2)) == [False, False]
    assert pair.attempt(lambda: pair.leader.broadcast("mine"), lambda: pair.follower.broadcast("yours")) == [
        "mine",
        "mine",
    ]
    # The leader finds that there is nothing to do for both.
    assert pair.attempt(lambda: "cached", agree[1]) == ["cached", None]

    told, own = pair.attempt(agree[0], fails("the file is damaged"))
    assert isinstance(told, RemoteAttemptFailed) and str(told) == "Host 1 (127.0.0.1): the file is damaged"
    assert isinstance(own, ValueError)

    told, own = pair.attempt(agree[0], fails("out of memory", RuntimeError))
    assert isinstance(told, RemoteAttemptFailed) and (told.ending, str(own)) == ("again", "out of memory")
    own, told = pair.attempt(fails("out of memory", RuntimeError), agree[1])
    assert isinstance(told, RemoteAttemptFailed) and (told.ending, str(own)) == ("again", "out of memory")
    # One fails for good: none tries again.
    own, told = pair.attempt(fails("damaged"), fails("out of memory", RuntimeError))
    assert isinstance(told, RemoteAttemptFailed) and (told.ending, str(own)) == ("failed", "damaged")

    wrong, told = pair.attempt(agree[0], lambda: pair.follower.barrier("run another"))
    assert str(wrong).startswith(
        "Hosts would run different programs: host 1 (127.0.0.1) run another, the leader run it."
    )
    assert isinstance(told, RemoteAttemptFailed)

    pair.host.is_cancelled = True
    cancelled, told = pair.attempt(agree[0], lambda: time.sleep(0.5) or pair.follower.barrier("run it"))
    assert isinstance(cancelled, Cancelled) and isinstance(told, RemoteAttemptFailed)
    pair.host.is_cancelled = False
    assert pair.attempt(*agree) == [True, True] and not pair.ends and not pair.left


def test_attempt_failure_releases_arrays_on_both_hosts(pair: Pair):
    class Array:
        pass

    left: list[weakref.ref] = []

    def work() -> None:
        array = Array()
        left.append(weakref.ref(array))
        raise RuntimeError("out of memory")

    def attempt(host: HostGroup) -> None:
        with contextlib.suppress(RuntimeError), host.attempt(lambda error: "again"):
            work()

    pair.join()
    gc.disable()
    try:
        following = threading.Thread(target=attempt, args=(pair.follower,))
        following.start()
        with pair.leader.stage("denoise", {}, pair.host):
            attempt(pair.leader)
        following.join(PATIENCE_S)
        assert [one() for one in left] == [None, None]
    finally:
        gc.enable()


def test_lost_follower_ends_stage_and_process(pair: Pair):
    pair.join()
    pair.follower._link.tell(LogLine("reading the last shard"))
    with pair.leader.stage("denoise", {}, pair.host) as progress:
        pair.follower._link.close()
        until(lambda: pair.leader.lost)
        lost = Expected(
            "multihost.lost",
            title="Host 1 (127.0.0.1)",
            why="it closed the connection",
            last=Expected("multihost.log_ended", log="reading the last shard"),
        )
        with (
            raises_message(HostsError, [lost, "multihost.restart_process"]),
            pair.leader.attempt(lambda error: "failed"),
        ):
            progress.check_cancelled()
    until(lambda: pair.ends)
    assert pair.ends[0][1] is None and "Its log ended: reading the last shard. This process ends" in pair.ends[0][0]


def test_log_handler_does_not_wait_for_stuck_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """It holds the lock of the log, which the thread of the line wanted when the leader was gone: both stayed."""
    monkeypatch.setattr(logging.getLogger("comfyui_tpu"), "handlers", [])
    pair.join()

    async def stuck(text: str) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as context:
        context.setattr(pair.follower._link._line, "send_str", stuck)
        logs = threading.Thread(target=logging.getLogger("comfyui_tpu").warning, args=("reading a shard",), daemon=True)
        logs.start()
        logs.join(30.0)
        assert not logs.is_alive()


def hello(jax: str = "") -> dict[str, Any]:
    """What the follower says first."""
    return {"process": 1, "count": 2, "terms": {**handshake.host_versions(), **({"jax": jax} if jax else {})}}


def test_leader_ignores_version_text_without_valid_token(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Its text was on the page, as why the next prompt failed."""
    pair.leader.listen()
    with monkeypatch.context() as context:
        context.setenv(auth.TOKEN_VARIABLE, "guess")
        with pytest.raises(HandshakeRejected, match="^the token is wrong or missing"):
            connection.connect(pair.address, hello("<b>another</b>"))
    assert not pair.leader._refused
    with pytest.raises(HandshakeRejected, match="versions differ .jax: <b>another</b> there"):
        connection.connect(pair.address, hello("<b>another</b>"))
    assert pair.leader._refused  # by one with the secret
    pair.join()


def test_leader_rejects_second_hello_of_connected_follower(pair: Pair):
    pair.join()
    with pytest.raises(HandshakeRejected, match=r"^Host 1 \(127.0.0.1\) is already connected"):
        connection.connect(pair.address, hello())
    assert pair.attempt(lambda: pair.leader.barrier("run it"), lambda: pair.follower.barrier("run it")) == [True, True]


@pytest.mark.parametrize("said", ['[0, {"__record__": "At", "what": [], "state": 1}]', f"[0, {'[' * 50_000}", "\0"])
def test_leader_invalid_message_marks_follower_lost(pair: Pair, said: str):
    """A TypeError or a RecursionError ended the thread that heard it."""
    pair.join()
    connection.run_on_loop(pair.follower._link._line.send_str(said))
    until(lambda: pair.leader.lost)
    assert str(pair.leader.lost).startswith("Host 1 (127.0.0.1) was lost (a message cannot be read")


def test_leader_ends_process_when_stage_is_stuck_after_loss(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leader, "GRACE_S", 0.1)
    pair.join()
    with pair.leader.stage("denoise", {}, pair.host):
        pair.follower._link.close()
        until(lambda: pair.ends)
    assert pair.ends[0][1] is pair.host


def test_follower_with_other_versions_is_rejected_with_same_message(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    mine = handshake.host_versions()
    versions = iter([{**mine, "jax": "0.1"}, mine])
    monkeypatch.setattr(handshake, "host_versions", lambda: next(versions))
    refused: list[str] = []

    def join() -> None:
        until(lambda: pair.host.said)
        try:
            pair.follower.join()
        except HandshakeRejected as error:
            refused.append(str(error))

    threading.Thread(target=join).start()
    with pytest.raises(HostsError) as missing, pair.leader.join(pair.host):
        pass
    until(lambda: refused)
    assert refused == [str(missing.value)]
    differ = Expected("multihost.versions_differ", title="Host 1 (127.0.0.1)", other=re.compile("^jax: 0.1 there, "))
    assert_message(str(missing.value).parameters["0"], differ)
    assert pair.host.said[0].startswith("Waiting for host 1 of 2, 4")
