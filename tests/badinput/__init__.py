"""Bad input, as a user meets it: on real processes, each clause once."""
