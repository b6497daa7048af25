"""Run-time type checks for the public surface. Hot paths go without."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

from steppe.core.errors import ConfigError

# A wrong argument is the caller's mistake and reads like the others; a wrong return value is ours. An int is a fine float.
checked = beartype(conf=BeartypeConf(violation_param_type=ConfigError, is_color=False, is_pep484_tower=True))
