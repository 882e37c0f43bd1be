"""Keeps the libraries' own progress bars and notices off the terminal: the commands show progress themselves."""

from __future__ import annotations

import functools
import logging


def quiet_libraries() -> None:
    """Called by a command before it exports or compares; imports transformers. Downloads from the hub keep their bars."""
    # Importing torch resets its loggers, so it comes first.
    import torch  # noqa: F401
    import transformers.modeling_gguf_pytorch_utils as gguf_utils
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from tqdm.auto import tqdm
    from transformers.utils import logging as transformers_logging

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Its reader of GGUF files has a bar that no switch reaches.
    gguf_utils.tqdm = functools.partial(tqdm, disable=True)  # type: ignore[attr-defined]
    enable_progress_bars()
