"""What the demo tells, and what it leaves. The demo itself is `make demo`."""
