"""What tests of the client share with those of nodes."""

from tests.tserver.conftest import cluster

__all__ = ["cluster"]
