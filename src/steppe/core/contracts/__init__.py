"""What the packages agree on: policies, algorithms, transport, environments, segments, specs, weights, reports, errors."""
