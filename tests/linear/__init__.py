"""What clients of real processes under real faults were told, judged for linearizability. `make linear`."""
