"""The parts that users compose: agent, environment, settings, parameter server."""
