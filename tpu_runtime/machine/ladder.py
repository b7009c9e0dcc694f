"""An engine's place on the ladder: a failure that another form of a program avoids is a step down, which is said."""

from collections.abc import Mapping, Sequence

from ...kernels.choice import Rungs
from ...sharding.mesh import Device
from . import fallbacks, record
from .fallbacks import WITHOUT_OVERLAP, Fallbacks, Halted, Unsupported
from .record import MachineRecord


class Ladder:
    """What programs do without on these devices: what the environment switches off, and what was found out before or by
    this process. `sentences` say why.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._key = record.key_of(devices[0].device_kind, len(devices))
        self._record = record.read(self._key)
        self._switched_off = fallbacks.from_environment()
        self._is_trial = False

    @property
    def fallbacks(self) -> Fallbacks:
        found = self._switched_off | self._record.fallbacks
        return found | WITHOUT_OVERLAP if self._is_trial else found

    @property
    def record(self) -> MachineRecord:
        """What was found out."""
        return self._record

    @property
    def sentences(self) -> list[str]:
        off = self._switched_off
        switched = [f"Switched off: {', '.join((*off.kernels.off, *off.options))}."] if off else []
        return [*switched, *self._record.sentences]

    def down(self, failure: Unsupported) -> str | None:
        """Steps down; the sentence that says so. None where no rung is left, so that the failure is the user's."""
        found = fallbacks.below(self.fallbacks, failure)
        if found is None:
            return None
        self._found_out(*found)
        return found[1]

    def halted(self, halt: Unsupported) -> Halted:
        """Records that a program halted the chips, for the next process; the error to raise in this one."""
        sentence = f"{halt.program} halted the chips ({halt.reason})."
        if halt.names:
            sentence += f" From the next start on XLA computes in place of {', '.join(halt.names)}, more slowly."
        self._found_out(Fallbacks(kernels=Rungs(off=halt.names)), sentence)
        return Halted(
            f"{sentence} This process cannot use the chips any more: restart it, unless it does so by itself."
        )

    def try_without_overlap(self, options: Mapping[str, str]) -> str | None:
        """Leaves transfers beside computation out for one attempt, after values that were not finite with these
        compiler options; the sentence that says so. None where that was tried, or where nothing overlaps.
        """
        given = self.fallbacks.left(options)
        if WITHOUT_OVERLAP.left(given) == given:
            return None
        self._is_trial = True
        return "The values are not finite: once more without transfers beside computation."

    def held(self) -> None:
        """An attempt succeeded: what was left out for it stays out."""
        if self._is_trial:
            self._is_trial = False
            self._found_out(
                WITHOUT_OVERLAP,
                "With transfers beside computation values were not finite, without they are: programs are compiled "
                "without, and are slower.",
            )

    def gave_up(self) -> None:
        """An attempt ended in an error, or was cancelled: what was left out for it alone is taken again."""
        self._is_trial = False

    def _found_out(self, more: Fallbacks, sentence: str) -> None:
        self._record = record.add(self._key, self._record | MachineRecord(fallbacks=more, sentences=(sentence,)))
