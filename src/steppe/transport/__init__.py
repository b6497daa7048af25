"""How segments, weights and shared tables travel: one module or subpackage per medium."""
