"""What a real API server answered, request by request, and that stele_local answers the same. See README.md."""
