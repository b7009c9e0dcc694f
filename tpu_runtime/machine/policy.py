"""An engine's fallbacks: a failed program is compiled again without the part that failed, and this is reported."""

from collections.abc import Mapping, Sequence

from ...kernels.dispatch import KernelFallbacks
from ...sharding.mesh import Device
from ..messages import compose, compose_list
from . import fallbacks, record
from .fallbacks import WITHOUT_OVERLAP, ChipHalted, Fallbacks, Unsupported
from .record import MachineRecord


class FallbackPolicy:
    """The kernels and options that programs avoid on these devices.

    They are switched off in the environment, or were found to fail by this process or an earlier one. `sentences`
    explain why.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._key = record.machine_key(devices[0].device_kind, len(devices))
        self._record = record.read_record(self._key)
        self._switched_off = fallbacks.fallbacks_from_environment()
        self._is_trial = False

    @property
    def fallbacks(self) -> Fallbacks:
        """Return all current fallbacks, those on trial included."""
        known = self._switched_off | self._record.fallbacks
        return known | WITHOUT_OVERLAP if self._is_trial else known

    @property
    def record(self) -> MachineRecord:
        """Return the failures that were found so far."""
        return self._record

    @property
    def sentences(self) -> list[str]:
        """Return the reasons of all fallbacks, as sentences for the user."""
        off = self._switched_off
        switched = [compose("machine.switched_off", value=", ".join((*off.kernels.off, *off.options)))] if off else []
        return [*switched, *self._record.sentences]

    def down(self, failure: Unsupported) -> str | None:
        """Apply the next fallback for a failure, and return its sentence; None after the last one.

        The caller then reports the failure to the user.
        """
        step = fallbacks.next_fallback(self.fallbacks, failure)
        if step is None:
            return None
        self._found_out(*step)
        return step[1]

    def record_halt(self, halt: Unsupported) -> ChipHalted:
        """Record for the next process that a program halted the chips. Returns the error to raise in this process."""
        sentence = compose("machine.program_halted_chips", program=halt.program, reason=halt.reason)
        if halt.names:
            replaced = compose("machine.replaced_from_next_start", names=", ".join(halt.names))
            sentence = compose_list([sentence, replaced], "space")
        self._found_out(Fallbacks(kernels=KernelFallbacks(off=halt.names)), sentence)
        return ChipHalted(compose("machine.restart_process", sentence=sentence))

    def try_without_overlap(self, options: Mapping[str, str]) -> str | None:
        """Disable overlapped transfers for one attempt, after values that were not finite. Returns a sentence.

        options: the compiler options of the failed attempt. Returns None if that was tried already, or if nothing
            overlaps.
        """
        remaining = self.fallbacks.left(options)
        if WITHOUT_OVERLAP.left(remaining) == remaining:
            return None
        self._is_trial = True
        return compose("machine.trying_without_overlap")

    def commit(self) -> None:
        """Commit the fallbacks of a successful attempt."""
        if self._is_trial:
            self._is_trial = False
            self._found_out(WITHOUT_OVERLAP, compose("machine.overlap_not_finite"))

    def record_comparison(self, digest: str, title: str, *, is_same: bool) -> str | None:
        """Record whether a program's step had the same bits with and without overlapped transfers.

        digest, title: of the program.
        is_same: whether the bits are equal.
        If the bits differ, overlapped transfers are switched off, and the sentence that reports it is returned.
        """
        verdict = MachineRecord(overlap={digest: is_same})
        sentence = None
        if not is_same:
            sentence = compose("machine.overlap_changes_bits", title=title)
            verdict |= MachineRecord(fallbacks=WITHOUT_OVERLAP, sentences=(sentence,))
        self._record = record.update_record(self._key, self._record | verdict)
        return sentence

    def rollback(self) -> None:
        """Roll back the fallbacks that were on trial, after an attempt that failed or was cancelled."""
        self._is_trial = False

    def _found_out(self, more: Fallbacks, sentence: str) -> None:
        self._record = record.update_record(
            self._key, self._record | MachineRecord(fallbacks=more, sentences=(sentence,))
        )
