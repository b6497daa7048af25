"""What several tests share: servers, fakes, oracles and environments."""
