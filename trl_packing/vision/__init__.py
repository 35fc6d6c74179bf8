"""Samples with images: rows from TRL's own collator, and the proof that each sample stays what it is alone."""

from .proof import check_images, samples_to_prove
from .rows import (
    IMAGE_COLUMNS,
    ImagePlan,
    ImageRowCollator,
    PaddedImageCollator,
    RawSamples,
    RopeIndex,
    keep_towers_apart,
    plan_image_evaluation,
    refuse_images,
)

__all__ = [
    "IMAGE_COLUMNS",
    "ImagePlan",
    "ImageRowCollator",
    "PaddedImageCollator",
    "RawSamples",
    "RopeIndex",
    "check_images",
    "keep_towers_apart",
    "plan_image_evaluation",
    "refuse_images",
    "samples_to_prove",
]
