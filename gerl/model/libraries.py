"""The libraries that models come from."""

import diffusers
import transformers


def quiet_libraries() -> None:
    """Let diffusers and transformers say nothing but errors, and show no progress bars of their own."""
    for library in (diffusers.logging, transformers.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
