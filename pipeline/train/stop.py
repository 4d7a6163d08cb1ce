"""Being asked to stop: signals, and the exit codes that schedulers see."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.runs import Checkpoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipeline.evaluate import Encoder

EXIT_BAD_INPUT = 2
EXIT_STALLED = 75  # EX_TEMPFAIL of sysexits.h: nothing moved any more; start again with --resume auto


class Stopped(Exception):  # noqa: N818 (not an error: somebody asked for it)
    """The run was asked to stop and has saved a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, signal_number: int) -> None:
        super().__init__(str(checkpoint.path))
        self.checkpoint = checkpoint
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """What a shell reports when the signal ends a program: 130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1."""
        return 128 + self.signal_number


class StopRequest:
    """Remembers SIGINT, SIGTERM and SIGUSR1 until the step is done.

    The launcher repeats what the terminal sends, so further signals change nothing. SIGUSR1 is what Slurm's
    `--signal=USR1@120` sends some time before the end.

    Attributes:
        number: of the first signal; 0 as long as none came.
    """

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        self.number = self.number or number


class Interrupted(Exception):  # noqa: N818 - not an error
    """An evaluation was cut off, on every rank, by a signal that some rank has seen."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number


class Interruptible:
    """An encoder that calls `between` before every batch; all ranks encode equally many, so it may be a collective."""

    def __init__(self, encoder: Encoder, between: Callable[[], None]) -> None:
        self._encoder = encoder
        self._between = between

    def encode_images(self, images: Sequence[bytes]) -> NDArray[np.float32]:
        """See `Encoder`."""
        self._between()
        return self._encoder.encode_images(images)

    def encode_texts(self, captions: Sequence[str]) -> NDArray[np.float32]:
        """See `Encoder`."""
        self._between()
        return self._encoder.encode_texts(captions)
