"""The libraries that models come from: their warnings about a user's input reach the run's log, once each."""

import logging
import re

import diffusers
import transformers

logger = logging.getLogger(__name__)
# warnings about how gerl itself calls the libraries, or that it gives in a sentence of its own
NOISE = re.compile(
    "was truncated because|sequence length is longer than"  # gerl.model.overlong counts them over all prompts
    "|true_cfg_scale is passed as"  # gerl.model.call.unguided names the keys
    "|passed to [A-Za-z]*Scheduler, but are not expected"  # of the scheduler that takes the pipeline's place
    r"|kept in float32: \[\]|requires torchvision|Guiders are currently|deprecated"
)


class _Relay(logging.Handler):
    """Passes each message on once, under the name of its library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.passed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split())
        if message not in self.passed and not NOISE.search(message):
            self.passed.add(message)
            logger.warning("%s: %s", record.name.partition(".")[0], message)


def relay_warnings() -> None:
    """Let diffusers and transformers warn in gerl's log, and say nothing else."""
    for library in (diffusers, transformers):
        library.logging.set_verbosity_warning()
        library.logging.disable_default_handler()
        known = logging.getLogger(library.__name__)
        known.propagate = False
        for handler in [handler for handler in known.handlers if isinstance(handler, _Relay)]:
            known.removeHandler(handler)  # of an earlier run in this process: this one hears of everything too
        known.addHandler(_Relay())


def quiet_libraries() -> None:
    """Show no progress bars of diffusers and transformers, and their warnings in gerl's log alone."""
    relay_warnings()
    for library in (diffusers.logging, transformers.logging):
        library.disable_progress_bar()
