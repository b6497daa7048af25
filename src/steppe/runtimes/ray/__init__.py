"""The `ray` runtime: one Ray actor per worker slot."""

from steppe.core.contracts.capabilities import Capabilities

CAPABILITIES = Capabilities(
    replay_roles=True,
    live_tuning=True,
    config_section="ray",
    modules=("ray",),
)
