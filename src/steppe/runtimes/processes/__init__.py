"""The `processes` runtime: one process per worker slot on this machine."""

from steppe.core.contracts.capabilities import Capabilities

CAPABILITIES = Capabilities(
    hosts_learner=True,
    fork_server=True,
    scales_actors=True,
    replay_roles=True,
    live_tuning=True,
)
