"""Where a run's time goes: sampler, flame graphs, timeline, report, diagnosis."""
