"""The Spark source and sink against real nodes."""
