"""Foundation of all packages: contracts, configuration, files, seeds and errors. Imports no other Steppe package."""
