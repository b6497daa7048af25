"""The `inline` runtime: all roles in the caller's process."""

from steppe.core.contracts.capabilities import Capabilities

CAPABILITIES = Capabilities(
    one_process=True,
    hosts_learner=True,
    replay_roles=True,  # as buffers in the one process
    live_tuning=True,
)
