"""Choice of the torch device."""

from __future__ import annotations

import torch

from steppe.core.contracts.errors import ConfigError


def resolve_device(device: str) -> str:
    """Resolve `auto` to the first GPU, or to the CPU if there is none; check `cpu`, `cuda` and `cuda:n`."""
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        return "cpu"
    if kind != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"device={device!r}: must be auto, cpu, cuda or cuda:n")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        found = f"{count} GPU(s) were found" if count else "no GPU was found"
        raise ConfigError(f"device={device!r}, but {found}: use device=auto or device=cpu")
    return f"cuda:{int(index or 0)}"
