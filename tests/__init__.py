"""The test suite; docs/testing.md says how it is organised."""
