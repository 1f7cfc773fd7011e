"""The Helm chart, rendered and judged. Needs a helm on the path, or in HELM; skipped where there is none."""
