"""How segments and weights travel: one module or subpackage per medium, each with a Channel and a WeightStore."""
