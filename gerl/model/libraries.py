"""The libraries that models come from."""

import diffusers
import transformers


def quiet_messages() -> None:
    """Let diffusers and transformers say nothing but errors."""
    for library in (diffusers.logging, transformers.logging):
        library.set_verbosity_error()


def quiet_libraries() -> None:
    """Let diffusers and transformers say nothing but errors, and show no progress bars of their own."""
    quiet_messages()
    for library in (diffusers.logging, transformers.logging):
        library.disable_progress_bar()
