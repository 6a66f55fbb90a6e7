"""The pipeline's stages, in the order of dvc.yaml; each runs alone: ``python -m stages.train --help``."""
