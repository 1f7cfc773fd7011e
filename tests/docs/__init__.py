"""What README.md and docs/ tell users to run, run."""
