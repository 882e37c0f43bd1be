"""Keeps the libraries' own progress bars and notices off the terminal: the commands show progress themselves."""

from __future__ import annotations

import logging


def quiet_libraries() -> None:
    """Called by a command before it exports or compares; imports transformers. Downloads from the hub keep their bars."""
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    enable_progress_bars()
