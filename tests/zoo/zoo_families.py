"""The families of the zoo, by kind and by name."""

from __future__ import annotations

from zoo_decoders import DECODERS
from zoo_encoders import ENCODERS
from zoo_later_decoders import LATER_DECODERS
from zoo_models import Family
from zoo_multimodal import MULTIMODAL
from zoo_other import OTHER
from zoo_seq2seq import SEQ2SEQ
from zoo_tiny import TINY
from zoo_tiny_others import TINY_OTHERS
from zoo_vision import VISION

KINDS = {
    "Decoders": DECODERS, "Later decoders": LATER_DECODERS, "Encoders": ENCODERS, "Encoder-decoders": SEQ2SEQ,
    "Vision and sound": VISION,
    "Text and images": MULTIMODAL, "Detection, series and others": OTHER, "Small defaults": [*TINY, *TINY_OTHERS],
}  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for families in KINDS.values() for family in families}
