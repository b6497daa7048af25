"""Where roles live: `launch(plan)` gives a handle. Topology is data; every runtime builds the same roles."""
