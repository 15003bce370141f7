"""Models: published layer shapes, and a trained checkpoint small enough to come as a package."""

from epicute.models.shapes import SHAPES, LayerShape, projections

__all__ = ["SHAPES", "LayerShape", "projections"]
