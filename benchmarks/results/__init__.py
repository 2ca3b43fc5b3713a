"""What is kept of benchmark runs: where a record comes from, the index of the records, and how they are shown."""
