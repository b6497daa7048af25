"""What every package uses: contracts, configuration, files, seeds and errors. It imports no other package of ours."""
