"""The `kafka` runtime: worker slots linked by topics, on this machine or in containers."""

from steppe.core.contracts.capabilities import Capabilities

CAPABILITIES = Capabilities(
    fork_server=True,
    scales_actors=True,
    workers=False,
    live_tuning=True,
    needs_brokers=True,
    config_section="kafka",
    modules=("confluent_kafka",),
)
