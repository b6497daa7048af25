"""The `kafka` runtime: places linked by topics, here or in containers."""
