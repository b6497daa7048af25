"""Results over seeds: statistics, charts, pages, and the files of reference results."""
