"""What real nodes write, recorded call by call, and power cuts at any of the calls: what is left must be a start. `make power`."""
