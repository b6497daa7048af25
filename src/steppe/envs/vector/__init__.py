"""Many environments stepped together, and the conversion of spaces to arrays."""
