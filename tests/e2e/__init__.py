"""End to end, on a real Kubernetes: `make e2e`. Skipped unless STELE_E2E is set, so that no cluster is used by chance.

Needs KUBECONFIG, helm, STELE_POWER (and STELE_IMAGE_LOAD where the machines cannot pull): docs/kubernetes.md. Each test
says what it waited for and how long it took; the list is printed at the end.
"""
