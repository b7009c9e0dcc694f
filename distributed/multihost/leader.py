"""Process 0: accepts the followers, announces what all run, synchronizes with them, and detects lost hosts."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from ...tpu_runtime import versions
from ...tpu_runtime.messages import compose, compose_list
from ...tpu_runtime.progress import Progress, run_in_daemon_thread
from ..rpc import codec
from ..rpc.connection import Connection, ConnectionLost, Hello, RpcServer
from ..rpc.messages import AbortAttempt, AttemptEnded, BarrierReached, GetChipStats, Invoke, Reply, Shutdown, Start
from . import distributed, handshake
from .coordinator import OUTCOMES, Arguments, AttemptOutcome, ChipRow, HostGroup, HostsError, Result
from .peer import FOLLOWER_MESSAGES, GuardedProgress, Peer
from .rank import HostRank

log = logging.getLogger(__name__)

# How long a prompt waits for followers that have not connected, in seconds.
JOIN_TIMEOUT_S = 45.0
# How long a host may take to end an aborted attempt, in seconds; after that it is stuck in a program.
ABORT_TIMEOUT_S = 30.0
# How long a stage may take to end by itself after the loss of a host, in seconds.
GRACE_S = 5.0
# While waiting for a host: seconds between checks for a cancel, and seconds until the status names the host.
POLL_S, REPORT_DELAY_S = 0.2, 2.0
# How long the loss of a host may take to be noticed here, in seconds; the chips may fail first.
LOSS_NOTICE_S = 1.0


class Leader(HostGroup):
    """The hosts of an engine, in the leader.

    `end` is called in a thread of its own when a host is lost and the process must be started again. It receives a
    sentence, and the progress of the stage if that is stuck on the chips, which nothing can interrupt.
    """

    def __init__(self, place: HostRank, end: Callable[[str, Progress | None], None]) -> None:
        self._place, self._end = place, end
        self._members: dict[int, Peer] = {}
        self._refused: dict[str, str] = {}
        self._begun = False
        self._door: RpcServer | None = None
        self._running: GuardedProgress | None = None
        self._changed = threading.Condition()
        self.lost: str | None = None

    def peers(self) -> list[Peer]:
        """Return the connected followers, by rank."""
        return [self._members[process] for process in sorted(self._members)]

    def _tell(self, message: object) -> None:
        for member in self.peers():
            member.link.tell(message)  # a lost connection is handled by `_hear`

    @contextlib.contextmanager
    def join(self, progress: Progress) -> Iterator[None]:
        """Wait for all followers, then join their chips to this process's. The chips are started within this context.

        Raises HostsError for missing followers.
        """
        with self._at_work(progress) as guarded:
            self._gather(guarded)
            yield

    def close(self) -> None:
        """Release the followers, because the process ends."""
        self._tell(Shutdown("the leader ended"))

    # -- see `HostGroup` -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stage(self, name: str, arguments: Arguments, progress: Progress) -> Iterator[Progress]:
        with self._at_work(progress) as guarded:
            self.tell(name, arguments)
            yield guarded

    def tell(self, request: str, arguments: Arguments) -> None:
        self._tell(Invoke(request, dict(arguments)))

    def barrier(self, what: str, state: object = None) -> bool:
        self._check_progress()
        states = [state]
        for member in self.peers():
            if (message := self._next(member)) is None:
                raise HostsError(compose("multihost.ended_early", title=member.title))
            if message.what != what:
                raise HostsError(compose(
                    "multihost.programs_differ", member=member, member_state=message.what, leader_state=what,
                ))  # fmt: skip
            states.append(message.state)
        is_same = all(other == states[0] for other in states)
        self._tell(Reply("go", is_same))
        return is_same

    def broadcast(self, value: Result) -> Result:
        self._tell(Reply("decided", value))
        return value

    def rows(self) -> list[ChipRow]:
        self._tell(GetChipStats())
        return [row for member in self.peers() for row in member.rows]

    # -- how an attempt ends -------------------------------------------------------------------------------------------

    def _wait_for_outcomes(self, deadline: float | None = None) -> None:
        """Wait until all followers have ended the attempt; `deadline` is set for followers that were told to abort."""
        for member in self.peers():
            while self._next(member, deadline) is not None:
                member.link.tell(AbortAttempt())  # it waits at a barrier that nobody else reaches

    def _verdict(self, own: AttemptOutcome | None, error: BaseException | None) -> tuple[AttemptOutcome | None, str]:
        """Return the outcome of an attempt, after an error here or elsewhere, or a cancel.

        Waits until the attempt has ended on all hosts.
        """
        if error is not None:
            is_of_chips = isinstance(error, RuntimeError) and not isinstance(error, HostsError)
            # The chips may fail first when a host is lost, with an error of their own.
            self._raise_if_lost(error, LOSS_NOTICE_S if is_of_chips else 0.0)
            self._tell(AbortAttempt())
            self._wait_for_outcomes(time.monotonic() + ABORT_TIMEOUT_S)
        failures = [failure for member in self.peers() if (failure := member.failure())]
        endings = {own, *(failure.ending for failure in failures)}
        verdict: AttemptOutcome | None = next((ending for ending in OUTCOMES if ending in endings), None)
        for member in self.peers():
            member.forget_attempt()
        self._tell(Reply("verdict", verdict))
        return verdict, next((str(failure) for failure in failures if failure.ending == verdict), "")

    def _next(self, member: Peer, deadline: float | None = None) -> BarrierReached | None:
        """Return a follower's next message of the attempt; None once it has ended the attempt.

        Meanwhile the status names the host that is waited for, and the user may cancel. With a `deadline` neither
        applies: the host counts as lost after it.
        """
        began, shown = time.monotonic(), ""
        while member.ended is None:
            if (message := member.next(POLL_S)) is not None:
                return message
            self._raise_if_lost()
            if deadline is None:
                self._check_progress()
                text = f"Waiting for {member}{': ' if member.text else ''}{member.text}"
                if time.monotonic() - began > REPORT_DELAY_S and text != shown and self._running:
                    shown = text
                    self._running.text(text)
            elif time.monotonic() > deadline:
                self._lost(compose("multihost.does_not_stop", title=member.title))
        return None

    def _check_progress(self) -> None:
        if self._running is not None:
            self._running.check_cancelled()

    # -- accepting followers -------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Accept followers from now on."""
        if self._door is not None:
            return
        versions.source_digest()  # reads the pack's source, before a follower waits for it
        door, port = RpcServer(self._problem, self._hear), self._place.address.port
        try:
            door.listen("", port)
        except OSError as error:
            raise HostsError(compose("multihost.cannot_listen", port=port, strerror=error.strerror)) from None
        self._door = door

    def _gather(self, progress: Progress) -> None:
        """Wait for all followers, then begin. Raises HostsError for followers that are missing or incompatible."""
        with self._changed:
            self._refused.clear()  # a host that was fixed meanwhile connects again
        self.listen()
        began = time.monotonic()
        while missing := self._missing():
            names = ", ".join(map(str, missing))
            hosts = f"host{'s' if len(missing) > 1 else ''} {names} of {self._place.count}"
            if self._refused:
                raise HostsError(compose_list(self._refused.values(), "space"))
            if time.monotonic() - began > JOIN_TIMEOUT_S:
                raise HostsError(compose(
                    "multihost.hosts_missing", count=self._place.count, hosts=hosts,
                    join_timeout_s=f"{JOIN_TIMEOUT_S:.0f}", address=self._place.address, missing=missing[0],
                ))  # fmt: skip
            progress.text(f"Waiting for {hosts}, {began + JOIN_TIMEOUT_S - time.monotonic():.0f} s more")
            progress.check_cancelled()
            with self._changed:
                self._changed.wait(1.0)
        progress.text(f"Joining {self._place.count} hosts")
        self._tell(Start(handshake.collect_environment()))
        try:
            distributed.initialize(self._place)
        except RuntimeError as error:
            self._lost(compose("multihost.join_failed", error=str(error).partition(chr(10))[0]))
            raise HostsError(str(self.lost)) from error

    def _missing(self) -> list[int]:
        """Return the ranks of the followers that have not connected. Once all have, none may be replaced."""
        with self._changed:
            missing = [process for process in range(1, self._place.count) if process not in self._members]
            self._begun = not missing
            return missing

    def _problem(self, hello: Hello, address: str) -> str | None:
        """Return why an authenticated follower cannot be accepted, or None."""
        process, count, place = int(hello["process"]), int(hello["count"]), self._place
        title, problem = f"Host {process} ({address})", None
        if count != place.count or not 0 < process < place.count:
            problem = compose(
                "multihost.host_count_differs", title=title, process=process, count=count,
                leader_count=place.count, last_process=place.count - 1,
            )  # fmt: skip
        elif other := handshake.describe_difference(handshake.host_versions(), dict(hello["terms"])):
            problem = compose("multihost.versions_differ", title=title, other=f"{other:.1000}")
        with self._changed:
            if problem is None:
                self._refused.pop(address + str(process), None)
                # The loss of its previous instance may not be noticed yet; it then reconnects later.
                return compose("multihost.already_connected", title=title) if process in self._members else None
            log.error("%s", problem)
            if len(self._refused) < place.count:
                self._refused[address + str(process)] = problem
            self._changed.notify_all()
        return problem

    async def _hear(self, link: Connection, hello: Hello, address: str) -> None:
        member = Peer(int(hello["process"]), address, link)
        with self._changed:
            if self._members.setdefault(member.process, member) is not member:
                return
            self._changed.notify_all()
        log.info("%s is connected", member)
        try:
            while True:
                message = await link.get(FOLLOWER_MESSAGES, codec.SETTINGS_RECORDS)
                member.handle(message)
                if isinstance(message, AttemptEnded) and message.ending:
                    asyncio.get_running_loop().call_later(ABORT_TIMEOUT_S, self._look_after, member, message)
        except ConnectionLost as error:
            self._gone(member, str(error))

    # -- lost hosts ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _at_work(self, progress: Progress) -> Iterator[GuardedProgress]:
        """Enter the progress of a stage. It raises for lost hosts, and is passed to `end` if the stage is stuck."""
        self._raise_if_lost()
        self._running = GuardedProgress(inner=progress, check=self._check)
        try:
            yield self._running
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _check(self) -> None:
        """Raise, in the stage's thread, if a host is lost or has failed."""
        self._raise_if_lost()
        for member in self.peers():
            if (failure := member.failure()) is not None:
                raise failure

    def _raise_if_lost(self, cause: BaseException | None = None, within_s: float = 0.0) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.lost, within_s)
        if self.lost is not None:
            raise HostsError(self.lost) from cause

    def _look_after(self, member: Peer, message: AttemptEnded) -> None:
        """Declare a host lost whose attempt failed long ago, if this process still waits for it on the chips."""
        if member.ended is message:
            self._lost(f"{member.title} failed: {message.error}")

    def _gone(self, member: Peer, why: str) -> None:
        with self._changed:
            if not self._begun:
                del self._members[member.process]
                log.warning("%s disconnected: %s", member, why)
                return
        last = compose("multihost.log_ended", log=" | ".join(member.log).rstrip(".")) if member.log else ""
        self._lost(compose("multihost.lost", title=member.title, why=why, last=last))

    def _lost(self, why: str) -> None:
        """Mark the hosts as lost: nothing can run here any more, and the process ends."""
        with self._changed:
            if self.lost is not None:
                return
            self.lost = compose_list([why, distributed.recovery_advice()], "space")
            self._changed.notify_all()
        for member in self.peers():
            member.link.post(Shutdown(why))  # one may be stuck
        run_in_daemon_thread(lambda: self._end_all(f"{self.lost}"), "comfyui-tpu-hosts-end")

    def _end_all(self, sentence: str) -> None:
        log.error("%s", sentence)
        with self._changed:
            self._changed.wait_for(lambda: self._running is None, GRACE_S)
            running = self._running
        self._end(sentence, running.inner if running else None)
