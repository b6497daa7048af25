"""Conformance suites to run on parts of your own: inherit one in a test file, say how to make the part, run pytest.

agent.py AgentConformance · board.py BoardConformance · channel.py ChannelConformance · env.py WorldConformance ·
memory.py MemoryConformance · runtime.py RuntimeConformance · weights.py WeightStoreConformance
"""
