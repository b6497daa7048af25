"""How segments and weights travel: a Channel and a WeightStore for one medium a file."""
