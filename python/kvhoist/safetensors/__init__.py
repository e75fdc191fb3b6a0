"""Checkpoints in the format safetensors, at the speed of the drives. Needs torch.

    from kvhoist.safetensors import load_file
    tensors = load_file("model.safetensors", device="cuda:0")

:func:`load_file` and :func:`load_files` return dictionaries as ``safetensors.torch.load_file`` does; :func:`iterate`
gives tensors as they arrive, for loaders that copy them into parameters; :class:`safe_open` reads what is asked for;
:func:`save_file` writes. The tensors of a file are views of one buffer, on a device too: it is freed with the last of
them. A file's header passes the checks of the safetensors library.
"""

from __future__ import annotations

from .lazy import safe_open
from .loading import load_file, load_files
from .saving import save_file
from .windows import iterate

__all__ = ["iterate", "load_file", "load_files", "safe_open", "save_file"]
